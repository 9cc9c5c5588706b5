//! Processes that speak the protocol and do not know the secret.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use hsdp_control::wire::{
    self, Authenticated, Challenge, Frame, FrameKind, Hello, PROTOCOL, Proof, Refusal,
};
use hsdp_control::{Membership, Rank};
use prost::bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Streaming;
use tonic::transport::Endpoint;

use crate::world::{World, quick};
use crate::{are_well, ends_after};

/// The connection of a process without the secret.
struct Stranger {
    out: mpsc::Sender<Frame>,
    frames: Streaming<Frame>,
}

impl Stranger {
    async fn at(address: SocketAddr) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        let channel = endpoint.connect().await.expect("a connection");
        let (out, frames) = wire::call(channel).await.expect("a stream");
        Self { out, frames }
    }

    async fn say(&self, kind: FrameKind) {
        self.out.send(kind.into()).await.expect("it is listened to");
    }

    async fn next(&mut self) -> Option<FrameKind> {
        self.frames.message().await.ok().flatten().map(|frame| frame.checked().expect("known"))
    }

    async fn challenge(&mut self) -> Challenge {
        match self.next().await {
            Some(FrameKind::Challenge(challenge)) => challenge,
            other => panic!("{other:?}"),
        }
    }

    async fn refusal(&mut self) -> String {
        match self.next().await {
            Some(FrameKind::Refusal(Refusal { reason, .. })) => reason,
            other => panic!("{other:?}"),
        }
    }
}

fn hello(rank: u32) -> Hello {
    Hello {
        protocol: PROTOCOL,
        job: "test".to_owned(),
        start: 1,
        rank,
        world: 2,
        build: "ours".to_owned(),
        nonce: Bytes::from_static(&[9; 32]),
        ..Hello::default()
    }
}

/// Attacks a world of two in which one rank is still missing.
fn with_one_missing(attack: impl AsyncFn(SocketAddr)) {
    let world = World::of(2, quick());
    let first = world.options();
    let first = std::thread::spawn(move || Membership::join(Rank::new(0), first));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(attack(world.server.address()));
    let second = world.join_as(1).expect("its place is still free");
    let first = first.join().expect("no panic").expect("it was not disturbed");
    are_well(&[first, second]);
}

#[test]
fn a_proof_that_is_none_is_refused() {
    with_one_missing(async |address| {
        let mut stranger = Stranger::at(address).await;
        stranger.say(FrameKind::Hello(hello(1))).await;
        stranger.challenge().await;
        stranger.say(FrameKind::Proof(Proof { proof: Bytes::from_static(&[0; 32]) })).await;
        assert_eq!(stranger.refusal().await, "its proof is wrong: it has another secret");
        assert!(stranger.next().await.is_none());
    });
}

#[test]
fn the_coordinators_own_proof_proves_nothing() {
    with_one_missing(async |address| {
        let mut stranger = Stranger::at(address).await;
        stranger.say(FrameKind::Hello(hello(1))).await;
        let proof = stranger.challenge().await.proof;
        stranger.say(FrameKind::Proof(Proof { proof })).await;
        assert_eq!(stranger.refusal().await, "its proof is wrong: it has another secret");
    });
}

#[test]
fn one_challenge_serves_one_handshake() {
    with_one_missing(async |address| {
        let mut one = Stranger::at(address).await;
        let mut other = Stranger::at(address).await;
        one.say(FrameKind::Hello(hello(1))).await;
        other.say(FrameKind::Hello(hello(1))).await;
        let first = one.challenge().await;
        let second = other.challenge().await;
        assert_ne!(first.nonce, second.nonce);
        assert_ne!(first.proof, second.proof);
    });
}

#[test]
fn who_says_something_else_is_refused() {
    let forged = Authenticated { mac: Bytes::from_static(&[0; 32]), ..Authenticated::default() };
    let proof = Proof { proof: Bytes::from_static(&[0; 32]) };
    let cases = [
        (FrameKind::Authenticated(forged), "not a hello"),
        (FrameKind::Proof(proof), "not a hello"),
        (FrameKind::Proof(Proof::default()), "malformed message: a proof of the wrong length"),
        (FrameKind::Hello(Hello::default()), "malformed message: a nonce of the wrong length"),
        (
            FrameKind::Hello(Hello { rank: 2, ..hello(0) }),
            "malformed message: a rank that is not in its world",
        ),
        (
            FrameKind::Hello(Hello { host: "h".repeat(257), ..hello(0) }),
            "malformed message: a host's name that is too long",
        ),
        (
            FrameKind::Hello(Hello { job: "other".to_owned(), ..hello(0) }),
            "it belongs to another job",
        ),
    ];
    with_one_missing(async |address| {
        for (says, expected) in cases.clone() {
            let mut stranger = Stranger::at(address).await;
            stranger.say(says).await;
            assert_eq!(stranger.refusal().await, expected);
        }
        let mut stranger = Stranger::at(address).await;
        stranger.out.send(Frame::default()).await.expect("it is listened to");
        assert_eq!(stranger.refusal().await, "malformed message: an empty frame");
    });
}

#[test]
fn who_is_refused_as_another_rank_cannot_be_any() {
    with_one_missing(async |address| {
        // A proof for one rank is invalid for another, since the rank is in the transcript.
        for rank in [Rank::new(0), Rank::new(1)] {
            let mut stranger = Stranger::at(address).await;
            stranger.say(FrameKind::Hello(hello(rank.get()))).await;
            let Challenge { proof, .. } = stranger.challenge().await;
            let proof: Vec<u8> = proof.iter().map(|byte| byte ^ 1).collect();
            stranger.say(FrameKind::Proof(Proof { proof: proof.into() })).await;
            assert_eq!(stranger.refusal().await, "its proof is wrong: it has another secret");
        }
    });
}

#[test]
fn a_web_browser_is_sent_away() {
    let world = World::of(2, quick());
    let members = world.join();
    let mut browser = TcpStream::connect(world.server.address()).expect("a connection");
    browser.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("written");
    let ended = ends_after(&mut browser, Duration::from_secs(3));
    assert!(ended.is_some_and(|after| after < Duration::from_secs(2)), "{ended:?}");
    are_well(&members);
}
