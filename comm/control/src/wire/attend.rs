//! The one method of the gRPC service, from both ends: a stream of frames in each direction.
//!
//! The code that `tonic-build` would generate, written by hand, so that the build needs no `protoc`.

use std::future::ready;

use hyper::body::Incoming;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::Frame;
use crate::limits::MOST_FRAME;

const PATH: &str = "/hsdp.control.Control/Attend";

/// The number of frames that may wait for HTTP/2.
const QUEUE: usize = 16;

/// The sender of the coordinator's frames.
pub type Replies = mpsc::Sender<Result<Frame, Status>>;

/// The coordinator's side of the method: answers a request. `begin` gets the stream of the member's frames, and does not
/// wait.
pub async fn answer(
    request: HttpRequest<Incoming>,
    begin: impl FnOnce(Streaming<Frame>, Replies) -> Result<(), Status> + Send,
) -> HttpResponse<Body> {
    if request.uri().path() != PATH {
        return Status::unimplemented("no such method").into_http();
    }
    let codec: ProstCodec<Frame, Frame> = ProstCodec::default();
    let grpc = tonic::server::Grpc::new(codec).max_decoding_message_size(MOST_FRAME);
    let mut grpc = grpc.max_encoding_message_size(MOST_FRAME);
    let mut begin = Some(begin);
    let method = tower::service_fn(move |frames: Request<Streaming<Frame>>| {
        let (replies, stream) = mpsc::channel(QUEUE);
        let begin = begin.take().ok_or_else(|| Status::internal("it is called once"));
        let begun = begin.and_then(|begin| begin(frames.into_inner(), replies));
        ready(begun.map(|()| Response::new(ReceiverStream::new(stream))))
    });
    grpc.streaming(method, request).await
}

/// The member's side of the method: a sender of frames, and the stream of the coordinator's frames.
///
/// # Errors
/// The error of gRPC or of the connection.
pub async fn call(channel: Channel) -> Result<(mpsc::Sender<Frame>, Streaming<Frame>), Status> {
    let (sender, frames) = mpsc::channel(QUEUE);
    let codec: ProstCodec<Frame, Frame> = ProstCodec::default();
    let grpc = tonic::client::Grpc::new(channel).max_decoding_message_size(MOST_FRAME);
    let mut grpc = grpc.max_encoding_message_size(MOST_FRAME);
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = PathAndQuery::from_static(PATH);
    let request = ReceiverStream::new(frames);
    let frames = grpc.streaming(Request::new(request), path, codec).await?.into_inner();
    Ok((sender, frames))
}
