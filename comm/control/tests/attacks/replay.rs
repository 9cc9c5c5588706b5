//! Replays of a recorded handshake.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hsdp_control::{Membership, Options, Rank};

use crate::ends_after;
use crate::exchange::in_one_world;
use crate::world::{World, quick};

/// A proxy to the coordinator that records all bytes of a member.
struct Way {
    address: SocketAddr,
    said: Arc<Mutex<Vec<u8>>>,
}

impl Way {
    fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let said = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&said);
        thread::spawn(move || {
            let (near, _) = listener.accept().expect("a connection");
            let far = TcpStream::connect(server).expect("a connection");
            let back = (far.try_clone().expect("one"), near.try_clone().expect("one"));
            thread::spawn(move || carry(back.0, back.1, |_| {}));
            carry(near, far, |bytes| record.lock().expect("no panic").extend(bytes));
        });
        Self { address, said }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, sees: impl Fn(&[u8])) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        sees(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // Both ends may be gone already.
    let _ = to.shutdown(Shutdown::Both);
}

#[test]
fn a_recorded_handshake_proves_nothing() {
    let mut deadlines = quick();
    deadlines.rendezvous = Duration::from_secs(4);
    // The refusal must end the connection, not the end of this direction.
    deadlines.handshake = Duration::from_secs(30);
    let world = World::of(3, deadlines);
    let way = Way::to(world.server.address());
    let options = Options { address: way.address, ..world.options() };
    let recorded = thread::spawn(move || Membership::join(Rank::new(1), options));
    let other = world.options();
    let other = thread::spawn(move || Membership::join(Rank::new(0), other));
    // Hello and proof have been sent when the preface and both frames have: a few hundred bytes.
    let said = settled(&way.said);
    assert!(said.windows(4).any(|part| part == b"test"), "the job's name is in it");

    let mut replay = TcpStream::connect(world.server.address()).expect("a connection");
    replay.write_all(&said).expect("written");
    let ended = ends_after(&mut replay, Duration::from_secs(4));
    assert!(ended.is_some_and(|after| after < Duration::from_secs(2)), "{ended:?}");

    let last = world.join_as(2).expect("all are there");
    let recorded = recorded.join().expect("no panic").expect("it was not disturbed");
    let _other = other.join().expect("no panic").expect("it was not disturbed");
    in_one_world(&recorded, &last);
}

#[test]
fn a_recorded_handshake_takes_no_free_place() {
    let recorded = {
        let world = World::of(1, quick());
        let way = Way::to(world.server.address());
        let options = Options { address: way.address, ..world.options() };
        Membership::join(Rank::new(0), options).expect("a member").leave().expect("heard");
        settled(&way.said)
    };
    let world = World::of(1, quick());
    let mut replay = TcpStream::connect(world.server.address()).expect("a connection");
    replay.write_all(&recorded).expect("written");
    let ended = ends_after(&mut replay, Duration::from_secs(4));
    assert!(ended.is_some_and(|after| after < Duration::from_secs(2)), "{ended:?}");
    world.join_as(0).expect("the place is free");
}

/// The recorded bytes, once no more arrive for 200 ms.
fn settled(said: &Mutex<Vec<u8>>) -> Vec<u8> {
    let look = || said.lock().expect("no panic").clone();
    let mut last = look();
    let mut since = Instant::now();
    while last.len() < 200 || since.elapsed() < Duration::from_millis(200) {
        thread::yield_now();
        let now = look();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    last
}
