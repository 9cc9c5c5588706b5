//! Ranks that fail, and the end of the others.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::job::{NCCL, PATIENCE, meeting, ran, until_gone};

#[test]
fn the_first_that_ends_badly_ends_the_others_and_gives_the_code() {
    let folder = TempDir::new().expect("a folder");
    let script = meeting(folder.path(), &[0, 2])
        + "if [ $rank = 1 ]; then others; exit 3; fi
           trap 'echo told; exit 7' TERM; up; while :; do sleep 0.02; done";
    let (code, said, told) = ran(&[&NCCL[..], &["-n", "3"]].concat(), &script);
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!((code, lines), (Some(3), vec!["[0] told", "[2] told"]), "{told}");
    let expected = "hsdp: rank 1 ended with exit code 3; the others get SIGTERM, and SIGKILL after 10 s\n\
         hsdp: attempt 0 failed: rank 1 ended with exit code 3\n";
    assert_eq!(told, expected);
}

#[test]
fn who_does_not_heed_sigterm_is_killed_after_the_grace() {
    let folder = TempDir::new().expect("a folder");
    let script = meeting(folder.path(), &[1])
        + "if [ $rank = 0 ]; then others; kill -9 $$; fi
           trap '' TERM; up; while :; do sleep 0.05; done";
    let began = Instant::now();
    let (code, _, told) = ran(&[&NCCL[..], &["-n", "2", "--grace", "1"]].concat(), &script);
    assert_eq!(code, Some(128 + 9));
    let expected = "hsdp: rank 0 was killed by signal 9 (SIGKILL); the others get SIGTERM, and SIGKILL after 1 s\n\
                    hsdp: the grace of 1 s is over: SIGKILL for rank 1\n\
                    hsdp: attempt 0 failed: rank 0 was killed by signal 9 (SIGKILL)\n";
    let took = began.elapsed();
    assert!(told == expected && took >= Duration::from_secs(1) && took < PATIENCE, "{told}");
}

/// A rank that ends leaves no process of its group.
#[test]
fn what_a_rank_leaves_ends_with_it() {
    let script = "sleep 300 & echo $!";
    let (code, said, _) = ran(&[&NCCL[..], &["-n", "2"]].concat(), script);
    assert_eq!(code, Some(0));
    let pids: Vec<String> = said.lines().map(|line| line[4..].to_owned()).collect();
    assert_eq!(pids.len(), 2);
    until_gone(&pids);
}

#[test]
fn a_job_that_fails_is_started_again_until_it_does_not() {
    let script =
        r#"if [ "$HSDP_RESTART" -lt 2 ] && [ "$RANK" = 0 ]; then exit 5; fi; echo "$HSDP_RESTART""#;
    let options = ["-n", "1", "--restarts", "4"];
    let (code, said, told) = ran(&[&NCCL[..], &options].concat(), script);
    assert_eq!((code, &*said), (Some(0), "[0] 2\n"));
    let expected = "hsdp: attempt 0 failed: rank 0 ended with exit code 5; starting again as attempt 1\n\
                    hsdp: attempt 1 failed: rank 0 ended with exit code 5; starting again as attempt 2\n";
    assert_eq!(told, expected);
}

#[test]
fn a_job_that_always_fails_ends_with_its_last_code() {
    let folder = TempDir::new().expect("a folder");
    let script =
        format!("echo >> {}/starts; exit \"$((HSDP_RESTART + 20))\"", folder.path().display());
    let (code, _, told) = ran(&[&NCCL[..], &["-n", "1", "--restarts", "2"]].concat(), &script);
    let starts = std::fs::read_to_string(folder.path().join("starts")).expect("written");
    assert_eq!((code, starts.len()), (Some(22), 3));
    assert!(told.ends_with("hsdp: attempt 2 failed: rank 0 ended with exit code 22\n"), "{told}");
}

/// The test is the launcher. If the attendant did not wait, mpirun could end before the launcher
/// knows of the rank's end.
#[test]
fn an_attendant_stays_until_the_launcher_lets_it_end() {
    // Each message has its length in four bytes, and its kind in the next one.
    const BEGIN: [u8; 5] = [1, 0, 0, 0, 0];
    const LEAVE: [u8; 5] = [1, 0, 0, 0, 4];
    const ENDED: u8 = 2;
    const DRAINED: u8 = 3;
    let folder = TempDir::new().expect("a folder");
    let socket = folder.path().join("ranks.sock");
    let listener = UnixListener::bind(&socket).expect("bound");
    let mut attendant = Command::new(env!("CARGO_BIN_EXE_hsdp"))
        .args(["launch-rank", "--", "true"])
        .env("HSDP_LAUNCH_SOCKET", &socket)
        .env("HSDP_RESTART", "0")
        .env("HSDP_LAUNCH_RANK", "0")
        .spawn()
        .expect("it starts");
    listener.set_nonblocking(true).expect("set");
    let until = Instant::now() + PATIENCE;
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(_) if Instant::now() < until => thread::park_timeout(Duration::from_millis(5)),
            Err(error) => panic!("it does not connect: {error}"),
        }
    };
    stream.set_nonblocking(false).expect("set");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    stream.write_all(&BEGIN).expect("written");
    let mut frames = [0; 7 + 7 + 5];
    stream
        .read_exact(&mut frames)
        .expect("the hello, the end of the command, and that of its lines");
    assert_eq!([frames[11], frames[18]], [ENDED, DRAINED], "{frames:?}");
    stream.set_read_timeout(Some(Duration::from_millis(200))).expect("set");
    let waits = stream.read(&mut [0]).expect_err("it has ended");
    assert_eq!(waits.kind(), ErrorKind::WouldBlock);
    stream.write_all(&LEAVE).expect("written");
    assert!(attendant.wait().expect("it ends").success());
}
