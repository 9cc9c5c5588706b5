//! The comparison with which a world begins.

use super::*;
use crate::remote::hello::ProcessHello;

/// One of two ranks, in a job of so many processes.
fn of_two(rank: usize, processes: usize) -> (Arc<Core>, Arc<Endpoint>) {
    let core = Core::new(2, WorldOptions::default());
    let asked = Asked { size: 2, processes };
    let transport = Box::new(Silent::default());
    let endpoint = Endpoint::new(&core.state, Rank::new(rank), asked, transport);
    (core, endpoint)
}

#[test]
fn a_job_of_fifty_thousand_processes_can_begin() {
    const PROCESSES: usize = 50_000;
    let hello = ProcessHello::of(2, &WorldOptions::default());
    let (_, first) = of_two(0, PROCESSES);
    first.greeting.lock().hellos[1..PROCESSES - 1].fill(Some(hello.clone()));
    first.greeted(Rank::new(PROCESSES - 1), hello).expect("it is the last");
    let [EndpointRequest::Send { to, message }] = &*Vec::from(first.requests()) else {
        panic!("one message to all")
    };
    assert_eq!(to.len(), PROCESSES - 1);
    let mut buffer = first.pool.take(message.bytes().len()).expect("there is memory");
    buffer.bytes_mut().copy_from_slice(message.bytes());
    let message = RankMessage::read(buffer).expect("it is read");
    let (_, second) = of_two(1, PROCESSES);
    let hellos = header::read(message.header()).expect("hellos");
    second.welcomed(Rank::new(0), hellos).expect("a welcome");
    assert_eq!(second.greet(Duration::ZERO), Ok(()));
}
