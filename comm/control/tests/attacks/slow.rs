//! Connections that are held open, and send little or nothing.

use std::io::Write as _;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hsdp_control::{Membership, Rank};

use crate::world::{LONG, Ticks, World, quick};
use crate::{are_well, ends_after};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

#[test]
fn a_connection_that_says_nothing_ends_with_the_handshakes_deadline() {
    let world = World::of(2, quick());
    let members = world.join();
    for said in [&b""[..], PREFACE, &PREFACE[..10]] {
        let mut slow = TcpStream::connect(world.server.address()).expect("a connection");
        let started = Ticks::start();
        slow.write_all(said).expect("written");
        ends_after(&mut slow, LONG).expect("it ends");
        let ended = started.elapsed();
        assert!(ended < Duration::from_millis(1500), "{ended:?} after {} bytes", said.len());
    }
    are_well(&members);
}

#[test]
fn a_connection_that_says_one_byte_after_the_other_ends_too() {
    let world = World::of(1, quick());
    let members = world.join();
    let mut slow = TcpStream::connect(world.server.address()).expect("a connection");
    let started = Ticks::start();
    let mut bytes = PREFACE.iter().chain(std::iter::repeat(&0));
    while started.elapsed() < Duration::from_secs(4) {
        let byte = bytes.next().copied().unwrap_or_default();
        if slow.write_all(&[byte]).is_err()
            || ends_after(&mut slow, Duration::from_millis(50)).is_some()
        {
            break;
        }
    }
    assert!(started.elapsed() < Duration::from_millis(1800), "{:?}", started.elapsed());
    are_well(&members);
}

#[test]
fn who_holds_connections_open_does_not_keep_members_out() {
    let mut deadlines = quick();
    deadlines.handshake = Duration::from_secs(30);
    let world = World::of(2, deadlines);
    let hold = || TcpStream::connect(world.server.address()).expect("a connection");
    let mut held: Vec<TcpStream> = (0..60).map(|_| hold()).collect();
    // Two for each rank and four. The others were refused, or are replaced.
    let alive =
        |held: &mut Vec<TcpStream>| held.iter_mut().map(is_open).filter(|open| *open).count();
    let started = Instant::now();
    while alive(&mut held) > 8 && started.elapsed() < Duration::from_secs(2) {}
    assert_eq!(alive(&mut held), 8);
    let first = world.options();
    let first = std::thread::spawn(move || Membership::join(Rank::new(0), first));
    let second = world.join_as(1).expect("there was room");
    let first = first.join().expect("no panic").expect("there was room");
    are_well(&[first, second]);
}

/// Whether a connection is open.
fn is_open(connection: &mut TcpStream) -> bool {
    ends_after(connection, Duration::from_millis(1)).is_none()
}
