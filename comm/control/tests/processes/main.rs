//! Worlds of real processes, which are killed, stopped and started as launchers start them.
//!
//! The program is its own member: with `RANK` in its environment it joins, and does what `HSDP_TEST_PART` says.

mod member;
mod world;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::world::World;

fn main() -> ExitCode {
    if std::env::var_os("HSDP_TEST_PART").is_some() {
        return member::run();
    }
    let trials = vec![
        Trial::test("processes_come_together_and_part", processes_come_together_and_part),
        Trial::test("a_killed_member_is_lost", a_killed_member_is_lost),
        Trial::test("a_stopped_member_is_suspected_and_comes_back", a_stopped_member),
        Trial::test("a_killed_coordinator_is_lost_to_all", a_killed_coordinator),
        Trial::test("a_secret_of_a_file_serves", a_secret_of_a_file_serves),
        Trial::test("what_is_wrong_is_one_line_and_exit_2", what_is_wrong),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn same(found: &str, expected: &str) -> Result<(), Failed> {
    if found == expected {
        Ok(())
    } else {
        Err(format!("{found:?} instead of {expected:?}").into())
    }
}

fn processes_come_together_and_part() -> Result<(), Failed> {
    let world = World::start(4, "exchange", &[]);
    let pids: Vec<String> = world.pids().iter().map(u32::to_string).collect();
    for (code, said, complaint) in world.end() {
        same(&complaint, "")?;
        same(&said, &format!("joined\npids {}\n", pids.join(" ")))?;
        same(&code, "exit status: 0")?;
    }
    Ok(())
}

fn a_killed_member_is_lost() -> Result<(), Failed> {
    let mut world = World::start(3, "watch", &[]);
    world.wait_until_all_say("joined");
    let killed = Instant::now();
    world.kill(1);
    let lost = "rank 1: Lost { why: \"its connection ended without a goodbye\" }";
    world.wait_until_says(0, lost);
    world.wait_until_says(2, lost);
    let took = killed.elapsed();
    if took > Duration::from_secs(1) {
        return Err(format!("{took:?} until it was known").into());
    }
    Ok(())
}

fn a_stopped_member() -> Result<(), Failed> {
    let mut world = World::start(3, "watch", &[]);
    world.wait_until_all_say("joined");
    world.stop(2);
    world.wait_until_says(0, "rank 2: Suspect");
    world.wait_until_says(1, "rank 2: Suspect");
    world.go_on(2);
    world.wait_until_says(0, "rank 2: Alive");
    world.wait_until_says(1, "rank 2: Alive");
    Ok(())
}

fn a_killed_coordinator() -> Result<(), Failed> {
    let mut world = World::start(3, "watch", &[]);
    world.wait_until_all_say("joined");
    let (address, killed) = (world.address(), Instant::now());
    world.kill(0);
    for rank in [1, 2] {
        let lost = format!(
            "ended: rank {rank} has lost the coordinator at {address}: its connection ended"
        );
        world.wait_until_says(rank, &lost);
    }
    let took = killed.elapsed();
    if took > Duration::from_secs(1) {
        return Err(format!("{took:?} until it was known").into());
    }
    Ok(())
}

fn a_secret_of_a_file_serves() -> Result<(), Failed> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("secret");
    let mut file =
        std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&path)?;
    std::io::Write::write_all(&mut file, "c3".repeat(32).as_bytes())?;
    let path = path.to_str().ok_or("a path")?;
    let world =
        World::start(2, "exchange", &[("HSDP_JOB_SECRET", ""), ("HSDP_JOB_SECRET_FILE", path)]);
    for (code, said, complaint) in world.end() {
        same(&complaint, "")?;
        same(&code, "exit status: 0")?;
        if !said.starts_with("joined\npids ") {
            return Err(said.into());
        }
    }
    Ok(())
}

fn what_is_wrong() -> Result<(), Failed> {
    let secret = "HSDP_JOB_SECRET: not set, nor is HSDP_JOB_SECRET_FILE: a job of several processes needs a secret of 64 hexadecimal digits\n";
    let cases: [(&[(&str, &str)], &str); 4] = [
        (&[("RANK", "7")], "RANK=7: ranks of a world of 2 are numbered from 0 to 1\n"),
        (
            &[("MASTER_PORT", "")],
            "MASTER_PORT: not set, while RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR are\n",
        ),
        (&[("HSDP_JOB_SECRET", "")], secret),
        (
            &[("HSDP_JOB_SECRET", "1234")],
            "HSDP_JOB_SECRET: 4 characters, it must be 64 hexadecimal digits\n",
        ),
    ];
    for (changes, expected) in cases {
        for (code, said, complaint) in World::start(2, "exchange", changes).end() {
            same(&complaint, expected)?;
            same(&said, "")?;
            same(&code, "exit status: 2")?;
        }
    }
    Ok(())
}
