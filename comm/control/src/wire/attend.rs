//! The one method of the gRPC service, from both ends: a stream of frames in each direction.
//!
//! The code that `tonic-build` would generate, written by hand, so that the build needs no `protoc`.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::codegen::{Service, http};
use tonic::server::StreamingService;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::Frame;
use crate::limits::MOST_FRAME;

const PATH: &str = "/hsdp.control.Control/Attend";

/// The number of frames that may wait for HTTP/2.
const QUEUE: usize = 16;

/// The stream of the coordinator's frames.
pub type Replies = ReceiverStream<Result<Frame, Status>>;

/// The coordinator's side of the method.
pub trait Attend: Clone + Send + Sync + 'static {
    /// Takes the stream of a member's frames, and returns the stream of the coordinator's. Does not wait.
    fn attend(&self, frames: Request<Streaming<Frame>>) -> Result<Replies, Status>;
}

/// The service, for tonic.
#[derive(Clone, Debug)]
pub struct Control<A>(pub A);

impl<A: Attend> Service<http::Request<Body>> for Control<A> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        if request.uri().path() != PATH {
            return Box::pin(ready(Ok(Status::unimplemented("no such method").into_http())));
        }
        let method = Method(self.0.clone());
        Box::pin(async move {
            let codec: ProstCodec<Frame, Frame> = ProstCodec::default();
            let mut grpc = tonic::server::Grpc::new(codec)
                .max_decoding_message_size(MOST_FRAME)
                .max_encoding_message_size(MOST_FRAME);
            Ok(grpc.streaming(method, request).await)
        })
    }
}

struct Method<A>(A);

impl<A: Attend> StreamingService<Frame> for Method<A> {
    type Response = Frame;
    type ResponseStream = Replies;
    type Future = Ready<Result<Response<Replies>, Status>>;

    fn call(&mut self, frames: Request<Streaming<Frame>>) -> Self::Future {
        ready(self.0.attend(frames).map(Response::new))
    }
}

/// The member's side of the method: a sender of frames, and the stream of the coordinator's frames.
///
/// # Errors
/// The error of gRPC or of the connection.
pub async fn call(channel: Channel) -> Result<(mpsc::Sender<Frame>, Streaming<Frame>), Status> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let frames = stream(channel, ReceiverStream::new(receiver)).await?;
    Ok((sender, frames))
}

async fn stream(
    channel: Channel,
    frames: impl Stream<Item = Frame> + Send + 'static,
) -> Result<Streaming<Frame>, Status> {
    let codec: ProstCodec<Frame, Frame> = ProstCodec::default();
    let mut grpc = tonic::client::Grpc::new(channel)
        .max_decoding_message_size(MOST_FRAME)
        .max_encoding_message_size(MOST_FRAME);
    let ready = grpc.ready().await;
    ready.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = PathAndQuery::from_static(PATH);
    Ok(grpc.streaming(Request::new(frames), path, codec).await?.into_inner())
}
