//! Attacks by processes without the secret. All are refused, while members exchange messages and are not affected.

#[path = "../control/exchange.rs"]
mod exchange;
mod flood;
mod huge;
mod replay;
mod slow;
mod strangers;
#[path = "../control/world.rs"]
#[allow(dead_code)]
mod world;

use std::io::{ErrorKind, Read as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hsdp_control::{Membership, State};

/// How long a connection lives that sends nothing more; `None` if it outlives `within`.
fn ends_after(connection: &mut TcpStream, within: Duration) -> Option<Duration> {
    let started = Instant::now();
    connection.set_read_timeout(Some(Duration::from_millis(20))).expect("a timeout");
    while started.elapsed() < within {
        match connection.read(&mut [0; 4096]) {
            Ok(0) => return Some(started.elapsed()),
            Ok(_) => {}
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {}
            Err(_) => return Some(started.elapsed()),
        }
    }
    None
}

/// Checks that all members are connected and get their messages.
fn are_well(members: &[Membership]) {
    let got = world::each(members.iter().collect(), |one: &Membership| {
        exchange::Exchange::of(one).round(one.rank().to_string().as_bytes()).expect("values")
    });
    let expected: Vec<Vec<u8>> =
        members.iter().map(|one| one.rank().to_string().into_bytes()).collect();
    for (member, values) in members.iter().zip(got) {
        assert_eq!(values, expected);
        assert!(member.status().states.iter().all(|state| *state == State::Alive));
    }
}
