//! Which ranks can join, and the errors that the others get.

use std::net::{SocketAddr, TcpListener};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hsdp_control::{
    Bind, Client, ClientOptions, ControlError, Job, Member, Membership, Rank, Secret, Server,
    ServerOptions, Subject, Terms,
};

use crate::world::{LONG, World, each, job, join, quick, secret, terms};

/// The errors of all ranks, in words.
fn errors(joined: Vec<Result<Membership, ControlError>>) -> Vec<String> {
    joined.into_iter().map(|joined| joined.expect_err("no world").to_string()).collect()
}

#[test]
fn worlds_of_any_size_come_together_and_part() {
    for size in 1..=8 {
        let world = World::of(size, quick());
        let members = world.join();
        let ranks: Vec<Rank> = terms_ranks(size);
        for (member, &rank) in members.iter().zip(&ranks) {
            assert_eq!((member.rank(), member.size()), (rank, size as usize));
            assert_eq!(member.members(), members[0].members());
            assert_eq!(member.members().iter().map(Member::rank).collect::<Vec<_>>(), ranks);
            assert!(member.members().iter().all(|one| one.pid() == std::process::id()));
        }
        let said = each(members.iter().collect(), |one| {
            one.exchange("ranks", one.rank().to_string().as_bytes()).expect("all are there")
        });
        let expected: Vec<Vec<u8>> = (0..size).map(|rank| rank.to_string().into_bytes()).collect();
        assert!(said.iter().all(|values| *values == expected), "{said:?}");
        each(members, |one| one.leave().expect("heard"));
        world.server.finish(LONG).expect("all have left");
    }
}

fn terms_ranks(size: u32) -> Vec<Rank> {
    (0..size as usize).map(Rank::new).collect()
}

#[test]
fn members_may_come_before_their_coordinator() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address");
    drop(free);
    let options = ClientOptions::new(address, Rank::new(0), job(), secret(), terms(1));
    let member = std::thread::spawn(move || Client::join(options.deadlines(quick())));
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(200) {
        std::thread::yield_now();
    }
    let options = ServerOptions::new(job(), secret(), terms(1)).deadlines(quick());
    let server = Server::start(options.bind(Bind::Loopback(address.port()))).expect("its port");
    let member = member.join().expect("no panic").expect("it was found");
    member.leave().expect("heard");
    server.finish(LONG).expect("left");
}

#[test]
fn all_are_told_alike_who_is_missing() {
    let world = World::of(4, quick());
    let started = Instant::now();
    let said = errors(join([0, 1, 3].map(|rank| world.options(rank)).into()));
    assert_eq!(said, [(); 3].map(|()| "after 2s ranks [2] have not joined; ranks [0, 1, 3] have"));
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    let late = Client::join(world.options(2)).expect_err("too late");
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
        let options = ClientOptions::new(address, rank, job(), secret(), terms(9));
        let joined = Client::join(options.deadlines(quick()));
        drop(server.lock().expect("no panic").take());
        joined.expect_err("one is missing").to_string()
    });
    let expected = "after 500ms ranks [8] have not joined; ranks [0, 1, 2, 3, 4, 5, 6, 7] have";
    assert!(said.iter().all(|said| said == expected), "{said:?}");
}

#[test]
fn a_second_claimant_is_refused_at_once_and_the_first_stays() {
    let world = World::of(2, quick());
    let options = [0, 0, 0].map(|rank| world.options(rank)).into();
    let started = Instant::now();
    let claimants = std::thread::spawn(move || join(options));
    // The third rank is free until here: two of the three claimants have been refused by then, or will be at once.
    let other = Client::join(world.options(1)).expect("the first stays, and is enough");
    let claimants = claimants.join().expect("no panic");
    let (first, refused): (Vec<_>, Vec<_>) = claimants.into_iter().partition(Result::is_ok);
    assert_eq!((first.len(), refused.len()), (1, 2));
    assert!(started.elapsed() < Duration::from_millis(1500), "{:?}", started.elapsed());
    for refusal in refused {
        let refusal = refusal.expect_err("refused");
        let ControlError::DuplicateRank { first, second } = &refusal else { panic!("{refusal}") };
        assert_eq!((first.rank(), second.rank()), (Rank::new(0), Rank::new(0)));
        assert_ne!(first.from(), second.from());
        assert_eq!(*first, other.members()[0]);
        assert!(refusal.to_string().contains("is refused: rank 0 (process "), "{refusal}");
    }
}

#[test]
fn who_differs_ends_it_for_all_at_once_and_alike() {
    let cases: [(Subject, Terms, &str, &str); 3] = [
        (Subject::WorldSize, terms(3), "3", "2"),
        (Subject::Build, terms(2).build("other").expect("short"), "other", "ours"),
        (Subject::Config, terms(2).config(8), "0x0000000000000008", "0x0000000000000000"),
    ];
    for (what, differing, found, expected) in cases {
        let ours = terms(2).build("ours").expect("short");
        let differing = match what {
            Subject::Build => differing,
            _ => differing.build("ours").expect("short"),
        };
        let options = ServerOptions::new(job(), secret(), ours.clone()).deadlines(quick());
        let server = Server::start(options).expect("a coordinator");
        let member = |rank, terms| {
            let rank = Rank::new(rank);
            let address = server.address();
            ClientOptions::new(address, rank, job(), secret(), terms).deadlines(quick())
        };
        let started = Instant::now();
        let said = errors(join(vec![member(0, ours.clone()), member(1, differing)]));
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
    let first = world.options(0);
    let first = std::thread::spawn(move || Client::join(first));
    let stranger = world.options_with(1, job(), Secret::from_bytes([1; 32]), terms(2));
    let started = Instant::now();
    let refused = Client::join(stranger).expect_err("another secret").to_string();
    let address = world.server.address();
    assert_eq!(
        refused,
        format!(
            "the process at {address} does not know the secret of the job `test` (start 1): \
             it has another secret, or is not an hsdp coordinator"
        )
    );
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    let second = Client::join(world.options(1)).expect("the place is still free");
    let first = first.join().expect("no panic").expect("it was not disturbed");
    assert_eq!(first.members(), second.members());
}

#[test]
fn a_coordinator_of_another_job_or_start_is_told_apart() {
    let world = World::of(1, quick());
    let others = [("test", 2, "`test` (start 2)"), ("other", 1, "`other` (start 1)")];
    for (name, start, shown) in others {
        let job = Job::new(name, start).expect("short");
        let options = world.options_with(0, job, secret(), terms(1));
        let refused = Client::join(options).expect_err("not this one").to_string();
        let address = world.server.address();
        let expected = format!(
            "the coordinator at {address} serves the job `test` (start 1), this is {shown}"
        );
        assert_eq!(refused, expected);
    }
    Client::join(world.options(0)).expect("nobody was disturbed");
}

#[test]
fn a_port_in_use_is_one_clear_error() {
    let squatter = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = squatter.local_addr().expect("an address");
    let options = ServerOptions::new(job(), secret(), terms(2));
    let refused = Server::start(options.bind(Bind::Address(address))).expect_err("in use");
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
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address");
    drop(free);
    let said = unreachable(address);
    let expected = format!("after 3s rank 1 has found no coordinator at {address}: ");
    assert!(said.starts_with(&expected) && said.contains("onnection refused"), "{said}");
}

/// The error of rank 1 for an address without a coordinator.
fn unreachable(address: SocketAddr) -> String {
    let options = ClientOptions::new(address, Rank::new(1), job(), secret(), terms(2));
    let started = Instant::now();
    let refused = Client::join(options.deadlines(quick())).expect_err("no coordinator");
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    refused.to_string()
}

#[test]
fn all_addresses_must_be_asked_for_by_name() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let address: SocketAddr = address.parse().expect("an address");
        let options = ServerOptions::new(job(), secret(), terms(1)).bind(Bind::Address(address));
        let refused = Server::start(options).expect_err("not by name").to_string();
        let expected = format!(
            "the coordinator cannot listen at {address}: use Bind::Everywhere to listen on all addresses"
        );
        assert_eq!(refused, expected);
    }
    let options = ServerOptions::new(job(), secret(), terms(1));
    assert!(Server::start(options.clone()).expect("started").address().ip().is_loopback());
    let everywhere = Server::start(options.bind(Bind::Everywhere(0))).expect("started");
    assert!(everywhere.address().ip().is_unspecified());
}

#[test]
fn what_cannot_be_is_refused_before_anybody_is_asked() {
    let world = World::of(1, quick());
    let options = world.options_with(1, job(), secret(), terms(1));
    let refused = Client::join(options).expect_err("no such rank").to_string();
    assert_eq!(refused, "rank 1 of a world of 1: ranks are numbered from 0 to 0");
    let refused = Terms::new(4097).expect_err("too many").to_string();
    assert_eq!(refused, "a world of 4097 ranks: there must be 1 to 4096");
    let refused = Job::new(&"x".repeat(257), 1).expect_err("too long").to_string();
    assert_eq!(refused, "the job's name has 257 bytes, at most 256 are allowed");
}

#[test]
fn a_secret_is_in_no_message_and_in_no_options() {
    let options = ServerOptions::new(job(), Secret::from_bytes([0xab; 32]), terms(1));
    let shown = format!("{options:?}");
    assert!(
        shown.contains("Secret(..)") && !shown.contains("171") && !shown.contains("abab"),
        "{shown}"
    );
}
