//! Row 53: no file descriptors, and no room in the queue of connections, when all come at once.

use std::fs;
use std::thread;
use std::time::Duration;

use hsdp_control::{Bootstrap, Membership, Rank};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit, setrlimit};

use crate::exchange::Exchange;
use crate::member::{deadlines, number, say};
use crate::world::{Launch, Process, all_say, end};

/// Longer than the handshakes of these worlds: after this time without an answer, a process tries again.
const LONGER_THAN_A_HANDSHAKE: Duration = Duration::from_millis(2500);

/// Sleeps for a fixed time.
#[expect(clippy::disallowed_methods, reason = "what has no room has none for a time")]
fn pause(time: Duration) {
    thread::sleep(time);
}

/// Lowers the limit of open files of this process.
pub(crate) fn limit_descriptors() {
    let most = number("HSDP_TEST_DESCRIPTORS", 0);
    if most > 0 {
        setrlimit(Resource::Nofile, at_most(most.into())).expect("fewer may always be had");
    }
}

fn at_most(descriptors: u64) -> Rlimit {
    Rlimit { current: Some(descriptors), ..getrlimit(Resource::Nofile) }
}

pub(crate) fn row_53_too_few_descriptors_for_the_world_are_said_at_once() {
    let launch = Launch::new(64, "rounds").set("HSDP_TEST_DESCRIPTORS", 50);
    let ended = launch.process(0).end();
    let said = ended.badly();
    let expected = "a world of 64 ranks: its coordinator needs ";
    let ending = " open files, this process may have 50 (ulimit -n)";
    assert!(said.starts_with(expected) && said.ends_with(ending), "{said}");
    assert!(ended.after < Duration::from_secs(10), "after {:?}", ended.after);
}

pub(crate) fn row_53_sixty_four_processes_come_though_there_were_no_descriptors() {
    let launch = Launch::new(64, "exchange").set("HSDP_TEST_HANDSHAKE", 2000);
    let mut world = vec![launch.process(0)];
    let pid = world[0].pid();
    while !has_thread(pid, "hsdp-control-0") {
        assert!(!world[0].has_ended(), "it has ended");
    }
    // Open files stay open, and no more can be opened.
    let usual = prlimit(Some(pid), Resource::Nofile, at_most(3)).expect("it is ours");
    let before = descriptors(pid);
    world.extend((1..64).map(|rank| launch.process(rank)));
    pause(LONGER_THAN_A_HANDSHAKE);
    assert!(descriptors(pid) <= before, "connections were accepted");
    prlimit(Some(pid), Resource::Nofile, usual).expect("it is ours");
    all_say(&mut world, "joined");
    let pids: Vec<String> = world.iter().map(|process| process.id().to_string()).collect();
    for (rank, ended) in end(world).into_iter().enumerate() {
        let said = match rank {
            0 => ended.warned("connections cannot be accepted: they wait"),
            _ => ended.well(),
        };
        assert_eq!(said, format!("pids {}\n", pids.join(" ")));
    }
}

/// Whether a process has started its member.
fn has_thread(of: Pid, name: &str) -> bool {
    let tasks = fs::read_dir(format!("/proc/{}/task", of.as_raw_nonzero())).expect("a Linux");
    let names = tasks.flatten().map(|task| fs::read_to_string(task.path().join("comm")));
    names.flatten().any(|found| found.trim_end() == name)
}

fn descriptors(of: Pid) -> usize {
    fs::read_dir(format!("/proc/{}/fd", of.as_raw_nonzero())).expect("a Linux").count()
}

/// Ranks of one process, each a thread: more than the queue of a listener holds.
pub(crate) fn join() -> Result<(), String> {
    let mut found = Bootstrap::from_env().map_err(|error| error.to_string())?;
    found.options.deadlines = deadlines();
    let first = found.rank.get();
    let options = found.options;
    let one = |rank: u32| {
        let member = Membership::join(Rank::new(rank as usize), options.clone());
        let member = member.map_err(|error| error.to_string())?;
        let pids = Exchange::of(&member).round(b"one of a crowd")?;
        assert_eq!(pids.len(), options.terms.world as usize);
        member.leave().map_err(|error| error.to_string())
    };
    thread::scope(|scope| {
        let ranks = first..first + number("HSDP_TEST_CROWD", 0);
        let one = &one;
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || one(rank))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    say("joined");
    Ok(())
}

pub(crate) fn row_53_two_hundred_come_though_the_queue_of_connections_was_full() {
    let launch = Launch::new(201, "exchange").set("HSDP_TEST_HANDSHAKE", 2000);
    let first = launch.process(0);
    launch.wait_until_listened_to();
    first.signal(Signal::STOP);
    let before = overflows();
    let crowds = launch.part("crowd").set("HSDP_TEST_CROWD", 50);
    let crowds: Vec<Process> = (0..4).map(|crowd| crowds.process(1 + 50 * crowd)).collect();
    pause(LONGER_THAN_A_HANDSHAKE);
    assert!(overflows() > before, "there was room for all of them");
    first.signal(Signal::CONT);
    for ended in end(crowds) {
        assert_eq!(ended.well(), "joined\n");
    }
    let said = first.end().well();
    assert!(said.starts_with("joined\npids "), "{said}");
}

/// How often the queue of a listener of this machine was full.
fn overflows() -> u64 {
    let text = fs::read_to_string("/proc/net/netstat").expect("a Linux");
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let names = lines.next().expect("names").split(' ');
    let values = lines.next().expect("values").split(' ');
    let found = names.zip(values).find(|(name, _)| *name == "ListenOverflows");
    found.and_then(|(_, value)| value.parse().ok()).expect("it is counted")
}
