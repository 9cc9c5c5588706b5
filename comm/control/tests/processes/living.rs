//! Processes that join and leave, that are killed, and that are stopped.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::exchange::pause;
use crate::world::{Launch, all_say, end};

pub(crate) fn processes_come_together_and_part() {
    let world = Launch::new(4, "exchange").world();
    let pids: Vec<String> = world.iter().map(|process| process.id().to_string()).collect();
    for ended in end(world) {
        assert_eq!(ended.well(), format!("joined\npids {}\n", pids.join(" ")));
    }
}

pub(crate) fn a_killed_member_is_lost() {
    let mut world = Launch::new(3, "watch").world();
    all_say(&mut world, "joined");
    let killed = Instant::now();
    world[1].signal(Signal::KILL);
    let lost = "rank 1: Lost { loss: Ended, why: \"its connection ended before it left\" }";
    world[0].wait_until_says(lost);
    world[2].wait_until_says(lost);
    let took = killed.elapsed();
    // Half of the time for which it would have to be silent.
    assert!(took < Duration::from_secs(10), "{took:?} until it was known");
}

pub(crate) fn row_4_a_stopped_member_comes_back() {
    let mut world = Launch::new(3, "rounds").world();
    all_say(&mut world, "half");
    world[2].signal(Signal::STOP);
    // More than two intervals of heartbeats, which are 200 ms here.
    pause(Duration::from_secs(1));
    world[2].signal(Signal::CONT);
    world[0].tell();
    for ended in end(world) {
        let said = ended.well();
        assert_eq!(said.lines().count(), 20, "the states after half of the rounds: {said}");
    }
}

pub(crate) fn a_secret_of_a_file_serves() {
    use std::os::unix::fs::OpenOptionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("secret");
    let file = std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&path);
    let mut file = file.expect("a file");
    std::io::Write::write_all(&mut file, "c3".repeat(32).as_bytes()).expect("written");
    let launch = Launch::new(2, "exchange").set("HSDP_JOB_SECRET", "");
    for ended in end(launch.set("HSDP_JOB_SECRET_FILE", path.display()).world()) {
        let said = ended.well();
        assert!(said.starts_with("joined\npids "), "{said}");
    }
}

pub(crate) fn what_is_wrong_is_one_line_and_exit_2() {
    let secret = "HSDP_JOB_SECRET: not set, nor is HSDP_JOB_SECRET_FILE: a job of several processes needs a secret of 64 hexadecimal digits";
    let cases = [
        (
            ("MASTER_PORT", ""),
            "MASTER_PORT: not set, while RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR are",
        ),
        (("HSDP_JOB_SECRET", ""), secret),
        (
            ("HSDP_JOB_SECRET", "1234"),
            "HSDP_JOB_SECRET: it has 4 characters, it must have 64 hexadecimal digits",
        ),
    ];
    for ((name, value), expected) in cases {
        for ended in end(Launch::new(2, "exchange").set(name, value).world()) {
            assert_eq!((ended.badly(), ended.said.as_str()), (expected, ""));
        }
    }
}
