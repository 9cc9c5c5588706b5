//! Ten thousand connections with junk, while members exchange messages.

use std::collections::VecDeque;
use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use hsdp_control::{Deadlines, Membership, State};

use crate::exchange::Exchange;
use crate::world::{World, each};

const CONNECTIONS: usize = 10_000;

/// The resident memory of this process, in bytes.
pub(crate) fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/statm").expect("a Linux");
    let pages = status.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    4096 * pages.expect("a number of pages")
}

/// The values that members get in `rounds` rounds.
fn values(members: &[Membership], rounds: u32) -> Vec<Vec<Vec<Vec<u8>>>> {
    each(members.iter().collect(), |one: &Membership| {
        let mut exchange = Exchange::of(one);
        let round = |round: u32| {
            let value: Vec<u8> = (0..1000 + round)
                .map(|at| (at * (round + one.rank().get())).to_le_bytes()[0])
                .collect();
            exchange.round(&value).expect("values")
        };
        (0..rounds).map(round).collect()
    })
}

fn junk(address: SocketAddr, number: usize, held: &mut VecDeque<TcpStream>) {
    // The listener's queue may be full. That is one connection less.
    let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) else {
        return;
    };
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let said: Vec<u8> = match number % 5 {
        0 => Vec::new(),
        1 => b"GET /metrics HTTP/1.1\r\n\r\n".to_vec(),
        2 => preface.to_vec(),
        3 => [&preface[..], &[0xff; 64]].concat(),
        _ => (0..512_usize).map(|at| (at * number).to_le_bytes()[0]).collect(),
    };
    // The coordinator may have closed it by then.
    let _ = stream.write_all(&said);
    held.push_back(stream);
    if held.len() > 50 {
        held.pop_front();
    }
}

#[test]
fn ten_thousand_connections_of_junk_change_nothing() {
    let world = World::of(4, Deadlines::default());
    let members = world.join();
    let rounds = 300;
    let expected = values(&members, rounds);
    let address = world.server.address();
    let before = resident();
    let started = Instant::now();
    thread::scope(|scope| {
        let flood = scope.spawn(move || {
            let mut held = VecDeque::new();
            (0..CONNECTIONS).for_each(|number| junk(address, number, &mut held));
        });
        let mut runs = 0;
        while !flood.is_finished() {
            assert!(values(&members, rounds) == expected, "other values");
            runs += 1;
        }
        assert!(runs > 0, "the flood was over before anything was exchanged");
    });
    let took = started.elapsed();
    assert!(took < Duration::from_secs(60), "{took:?}");
    assert!(values(&members, rounds) == expected, "other values afterwards");
    for member in &members {
        let status = member.status();
        assert!(status.states.iter().all(|state| *state == State::Alive), "{status:?}");
        assert_eq!(status.ended, None);
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes more");
}

#[test]
fn members_come_together_in_a_flood() {
    let world =
        World::of(4, Deadlines { rendezvous: Duration::from_secs(15), ..Deadlines::default() });
    let address = world.server.address();
    let over = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = VecDeque::new();
            let mut numbers = 0..;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                junk(address, numbers.next().unwrap_or_default(), &mut held);
            }
        });
        let joined = each((0..4).collect(), |rank| world.join_as(rank));
        // Also if a member has not joined: otherwise the flood, and with it the test, has no end.
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        let members: Vec<_> = joined.into_iter().map(|one| one.expect("a member")).collect();
        crate::are_well(&members);
    });
}
