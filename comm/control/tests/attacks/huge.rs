//! Messages with absurd lengths.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use prost::bytes::{BufMut as _, Bytes, BytesMut};
use tonic::codegen::http::Request;

use crate::flood::resident;
use crate::world::{World, quick};
use crate::{are_well, ends_after};

/// Sends the body of a call, and returns all answers until the call has ended.
async fn answer(address: SocketAddr, body: Vec<Bytes>) -> String {
    let connection = tokio::net::TcpStream::connect(address).await.expect("a connection");
    let (client, connection) = h2::client::handshake(connection).await.expect("HTTP/2");
    tokio::spawn(connection);
    let mut client = client.ready().await.expect("ready");
    let request = Request::post(format!("http://{address}/hsdp.control.Control/Attend"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    let request = request.body(()).expect("a request");
    let (response, mut stream) = client.send_request(request, false).expect("sent");
    for part in body {
        if send(&mut stream, part).await.is_none() {
            break;
        }
    }
    let mut answer = response.await.expect("a call is answered at once").into_body();
    let mut words = Vec::new();
    while let Some(Ok(data)) = answer.data().await {
        words.extend(data);
    }
    String::from_utf8_lossy(&words).into_owned()
}

/// Sends bytes as fast as HTTP/2 takes them; `None` if the stream has ended, or takes nothing for a while.
async fn send(stream: &mut h2::SendStream<Bytes>, mut part: Bytes) -> Option<()> {
    while !part.is_empty() {
        stream.reserve_capacity(part.len());
        let capacity = std::future::poll_fn(|context| stream.poll_capacity(context));
        let capacity = tokio::time::timeout(Duration::from_secs(2), capacity).await.ok()??.ok()?;
        let now = part.split_to(capacity.min(part.len()));
        stream.send_data(now, false).ok()?;
    }
    Some(())
}

/// Sends each body, and expects its answer.
fn attack(bodies: Vec<(Vec<Bytes>, &str)>) {
    let world = World::of(2, quick());
    let members = world.join();
    let before = resident();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    for (body, expected) in bodies {
        let answer = answer(world.server.address(), body);
        let limit = Duration::from_secs(8);
        let answer = runtime.block_on(async { tokio::time::timeout(limit, answer).await });
        let answer = answer.expect("the call is over in time");
        assert!(answer.contains(expected), "{answer:?} instead of {expected}");
        are_well(&members);
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes more");
}

/// A gRPC message: a length, and the content.
fn message(length: u32, content: &[u8]) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(length);
    bytes.put_slice(content);
    bytes.freeze()
}

#[test]
fn lengths_that_nobody_means_take_no_memory() {
    // A frame whose hello states a length of 2^63 bytes.
    let protobuf = [0x0a, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01];
    // A hello whose job states a length of 2^63 bytes.
    let inner = [0x0a, 0x0b, 0x12, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01];
    let known = |bytes: &[u8]| message(u32::try_from(bytes.len()).expect("few"), bytes);
    attack(vec![
        (vec![message(u32::MAX, b"x")], "found 4294967295 bytes, the limit is: 67584 bytes"),
        (vec![message((66 << 10) + 1, b"x")], "found 67585 bytes, the limit is: 67584 bytes"),
        (vec![known(&protobuf)], "Frame.kind: buffer underflow"),
        (vec![known(&inner)], "Hello.job: Frame.kind: buffer underflow"),
        (vec![Bytes::from_static(&[7, 0, 0, 0, 1, 0])], "compression flag: 7"),
    ]);
}

#[test]
fn a_hundred_megabytes_are_not_read() {
    let part = Bytes::from(vec![0x41; 1 << 20]);
    let said = message(100 << 20, b"");
    let body = std::iter::once(said).chain(std::iter::repeat_n(part, 100)).collect();
    attack(vec![(body, "found 104857600 bytes, the limit is: 67584 bytes")]);
}

#[test]
fn a_huge_frame_of_http2_ends_its_connection() {
    let world = World::of(2, quick());
    let members = world.join();
    let frames: [&[u8]; 3] = [
        &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1],
        &[0xff, 0xff, 0xff, 4, 0, 0, 0, 0, 0],
        &[0x00, 0xff, 0xff, 9, 0, 0x7f, 0xff, 0xff, 0xff],
    ];
    for frame in frames {
        let mut connection = TcpStream::connect(world.server.address()).expect("a connection");
        connection
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            .expect("written");
        connection.write_all(frame).expect("written");
        let ended = ends_after(&mut connection, Duration::from_secs(3));
        assert!(ended.is_some_and(|after| after < Duration::from_secs(2)), "{ended:?}");
    }
    are_well(&members);
}
