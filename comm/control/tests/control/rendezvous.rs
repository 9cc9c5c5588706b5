//! Which ranks can join, and the errors that the others get.

use std::net::{SocketAddr, TcpListener};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hsdp_control::RendezvousError::DuplicateRank;
use hsdp_control::{ControlError, Job, Membership, Options, Rank, Secret, Server, Subject, Terms};

use crate::address::free_address;
use crate::exchange::Exchange;
use crate::world::{LONG, Ticks, World, each, options, quick, terms};

/// The errors of all ranks, in words.
fn errors(joined: Vec<Result<Membership, ControlError>>) -> Vec<String> {
    joined.into_iter().map(|joined| joined.expect_err("no world").to_string()).collect()
}

#[test]
fn worlds_of_any_size_come_together_and_part() {
    for size in 1..=8 {
        let world = World::of(size, quick());
        let members = world.join();
        for (rank, member) in members.iter().enumerate() {
            assert_eq!((member.rank(), member.size()), (Rank::new(rank), size as usize));
        }
        let said = each(members.iter().collect(), |one| {
            let pid = std::process::id();
            Exchange::of(one)
                .round(format!("{} {pid}", one.rank()).as_bytes())
                .expect("all are there")
        });
        let value = |rank: u32| format!("{rank} {}", std::process::id()).into_bytes();
        let expected: Vec<Vec<u8>> = (0..size).map(value).collect();
        assert!(said.iter().all(|values| *values == expected), "{said:?}");
        each(members, |one| one.leave().expect("heard"));
        world.server.finish(LONG).expect("all have left");
    }
}

#[test]
fn members_may_come_before_their_coordinator() {
    let options = Options { address: free_address(), ..options(1) };
    let joining = options.clone();
    let member = std::thread::spawn(move || Membership::join(Rank::new(0), joining));
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(200) {
        std::thread::yield_now();
    }
    let server = Server::start(options).expect("its port");
    let member = member.join().expect("no panic").expect("it was found");
    member.leave().expect("heard");
    server.finish(LONG).expect("left");
}

#[test]
fn all_are_told_alike_who_is_missing() {
    let world = World::of(4, quick());
    let started = Ticks::start();
    let said = errors(each(vec![0, 1, 3], |rank| world.join_as(rank)));
    assert_eq!(said, [(); 3].map(|()| "after 2s ranks [2] have not joined; ranks [0, 1, 3] have"));
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    let late = world.join_as(2).expect_err("too late");
    assert_eq!(late.to_string(), said[0]);
    world.server.finish(LONG).expect("nobody is in");
}

#[test]
fn all_are_told_though_the_coordinator_ends_when_the_first_is() {
    let mut deadlines = quick();
    deadlines.rendezvous = Duration::from_millis(500);
    let world = World::of(9, deadlines);
    let server = Mutex::new(Some(world.server));
    let address = server.lock().expect("no panic").as_ref().expect("started").address();
    let said = each((0..8).map(Rank::new).collect(), |rank| {
        let joined = Membership::join(rank, Options { address, ..options(9) });
        drop(server.lock().expect("no panic").take());
        joined.expect_err("one is missing").to_string()
    });
    let expected = "after 500ms ranks [8] have not joined; ranks [0, 1, 2, 3, 4, 5, 6, 7] have";
    assert!(said.iter().all(|said| said == expected), "{said:?}");
}

#[test]
fn a_second_claimant_is_refused_at_once_and_the_first_stays() {
    let world = World::of(2, quick());
    let options = world.options();
    let started = Ticks::start();
    let claimants = std::thread::spawn(move || {
        each(vec![(); 3], |()| Membership::join(Rank::new(0), options.clone()))
    });
    // The third rank is free until here: two of the three claimants have been refused by then, or
    // will be at once.
    let _other = world.join_as(1).expect("the first stays, and is enough");
    let claimants = claimants.join().expect("no panic");
    let (first, refused): (Vec<_>, Vec<_>) = claimants.into_iter().partition(Result::is_ok);
    assert_eq!((first.len(), refused.len()), (1, 2));
    assert!(started.elapsed() < Duration::from_millis(1500), "{:?}", started.elapsed());
    for refusal in refused {
        let refusal = refusal.expect_err("refused");
        let ControlError::Rendezvous(DuplicateRank { first, second }) = &refusal else {
            panic!("{refusal}")
        };
        assert_eq!((first.rank, second.rank), (Rank::new(0), Rank::new(0)));
        assert_ne!(first.from, second.from);
        assert_eq!(first.pid, std::process::id());
        assert!(refusal.to_string().contains("is refused: rank 0 (process "), "{refusal}");
    }
}

#[test]
fn who_differs_ends_it_for_all_at_once_and_alike() {
    let cases: [(Subject, Terms, &str, &str); 3] = [
        (Subject::WorldSize, terms(3), "3", "2"),
        (Subject::Build, Terms { build: "other".to_owned(), ..terms(2) }, "other", "ours"),
        (
            Subject::Config,
            Terms { config: 8, ..terms(2) },
            "0x0000000000000008",
            "0x0000000000000000",
        ),
    ];
    for (what, differing, found, expected) in cases {
        let ours = options(2);
        let server = Server::start(ours.clone()).expect("a coordinator");
        let ours = Options { address: server.address(), ..ours };
        let differing = Options { terms: differing, ..ours.clone() };
        let started = Ticks::start();
        let said = errors(each(vec![(0, ours), (1, differing)], |(rank, options)| {
            Membership::join(Rank::new(rank), options)
        }));
        assert_eq!(said[0], said[1]);
        assert!(said[0].starts_with(&format!("{what} differs: rank 1 (process ")), "{}", said[0]);
        let ending = format!(" has {found}, the coordinator has {expected}");
        assert!(said[0].ends_with(&ending), "{}", said[0]);
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    }
}

#[test]
fn another_secret_is_found_out_by_its_owner_and_by_nobody_else() {
    let world = World::of(2, quick());
    let first = world.options();
    let first = std::thread::spawn(move || Membership::join(Rank::new(0), first));
    let stranger = Options { secret: Secret::from_bytes([1; 32]), ..world.options() };
    let started = Ticks::start();
    let refused = Membership::join(Rank::new(1), stranger).expect_err("another secret").to_string();
    let address = world.server.address();
    assert_eq!(
        refused,
        format!(
            "the process at {address} does not know the secret of the job `test` (start 1): \
             it has another secret, or is not an hsdp coordinator"
        )
    );
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    let second = world.join_as(1).expect("the place is still free");
    let first = first.join().expect("no panic").expect("it was not disturbed");
    crate::exchange::in_one_world(&first, &second);
}

#[test]
fn a_coordinator_of_another_job_or_start_is_told_apart() {
    let world = World::of(1, quick());
    let others = [("test", 2, "`test` (start 2)"), ("other", 1, "`other` (start 1)")];
    for (name, start, shown) in others {
        let job = Job { name: name.to_owned(), start };
        let options = Options { job, ..world.options() };
        let refused =
            Membership::join(Rank::new(0), options).expect_err("not this one").to_string();
        let address = world.server.address();
        let expected = format!(
            "the coordinator at {address} serves the job `test` (start 1), this is {shown}"
        );
        assert_eq!(refused, expected);
    }
    world.join_as(0).expect("nobody was disturbed");
}

#[test]
fn a_port_in_use_is_one_clear_error() {
    let squatter = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = squatter.local_addr().expect("an address");
    let refused = Server::start(Options { address, ..options(2) }).expect_err("in use");
    let said = refused.to_string();
    let expected = format!("the coordinator cannot listen at {address}: Address already in use");
    assert!(said.starts_with(&expected), "{said}");
    let said = unreachable(address);
    assert_eq!(
        said,
        format!(
            "after 3s rank 1 has found no coordinator at {address}: a server that sends nothing for 1s"
        )
    );
}

#[test]
fn a_web_server_is_no_coordinator() {
    let squatter = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = squatter.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in squatter.incoming() {
            use std::io::{Read as _, Write as _};
            let mut stream = stream.expect("a connection");
            // An error concerns only the other end.
            let _ = stream.read(&mut [0; 64]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let said = unreachable(address);
    let expected = format!(
        "after 3s rank 1 has found no coordinator at {address}: a server that is not a coordinator: "
    );
    assert!(said.starts_with(&expected), "{said}");
}

#[test]
fn where_nobody_listens_there_is_nobody() {
    let address = free_address();
    let said = unreachable(address);
    let expected = format!("after 3s rank 1 has found no coordinator at {address}: ");
    assert!(said.starts_with(&expected) && said.contains("onnection refused"), "{said}");
}

/// The error of rank 1 for an address without a coordinator.
fn unreachable(address: SocketAddr) -> String {
    let started = Ticks::start();
    let options = Options { address, ..options(2) };
    let refused = Membership::join(Rank::new(1), options).expect_err("no coordinator");
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    refused.to_string()
}

#[test]
fn an_address_that_stands_for_all_is_refused() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let address: SocketAddr = address.parse().expect("an address");
        let refused =
            Server::start(Options { address, ..options(1) }).expect_err("all").to_string();
        let expected =
            format!("the coordinator cannot listen at {address}: it stands for all addresses");
        assert_eq!(refused, expected);
    }
    assert!(Server::start(options(1)).expect("started").address().ip().is_loopback());
}

#[test]
fn what_cannot_be_is_refused_before_anybody_is_asked() {
    let world = World::of(1, quick());
    let refused = world.join_as(1).expect_err("no such rank").to_string();
    assert_eq!(refused, "rank 1 of a world of 1: ranks are numbered from 0 to 0");
    let refused = Server::start(options(4097)).expect_err("too many").to_string();
    assert_eq!(refused, "a world of 4097 ranks: there must be 1 to 4096");
    let job = Job { name: "x".repeat(257), start: 1 };
    let refused = Server::start(Options { job, ..options(1) }).expect_err("too long").to_string();
    assert_eq!(refused, "the job's name has 257 bytes, at most 256 are allowed");
}

#[test]
fn a_secret_is_in_no_message_and_in_no_options() {
    let options = Options { secret: Secret::from_bytes([0xab; 32]), ..options(1) };
    let shown = format!("{options:?}");
    assert!(
        shown.contains("Secret(..)") && !shown.contains("171") && !shown.contains("abab"),
        "{shown}"
    );
}
