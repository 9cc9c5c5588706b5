//! A reader of the output that stands still, and a job that ends in time all the same.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::job::{Job, NCCL, command, in_shell, ran, until_ended, until_gone};
use crate::mpi::with_mpirun;
use crate::output::until_still;

/// Returns a script of `sh` in which `fill` writes to stdout until the reader has read `lines`
/// lines, far more than the pipes hold, and notes their number.
fn filling(count: &Path, lines: u32) -> String {
    let count = count.display();
    format!(
        "fill() {{ i=0; while [ $i -lt {lines} ]; do i=$((i + 1)); printf '%09000d\\n' $i; echo $i > {count}; done; }}
         "
    )
}

/// Script of `sh` that ends although nobody reads its lines, which are more than the pipe to the
/// reader holds.
const FITS: &str = "for i in 1 2 3; do printf '%060000d\\n' $i; done; ";

/// A folder, and the files in which ranks note how far they have come.
struct Notes {
    folder: TempDir,
}

impl Notes {
    fn new() -> Self {
        Self { folder: TempDir::new().expect("a folder") }
    }

    fn of(&self, rank: u32) -> std::path::PathBuf {
        self.folder.path().join(rank.to_string())
    }

    /// A job of two ranks that fill their stdout.
    fn job(&self, grace: u32, script: &str) -> Job {
        let fill = filling(&self.folder.path().join("$RANK"), 200);
        let grace = grace.to_string();
        let options = [&NCCL[..], &["-n", "2", "--restarts", "3", "--grace", &grace]].concat();
        let job = Job::start(&options, &(fill + script));
        [0, 1].into_iter().for_each(|rank| until_still(&self.of(rank)));
        job
    }
}

/// Whether a line about lost lines is among the messages.
fn is_told(told: &str) -> bool {
    told.lines().any(|line| line.ends_with(" lines of output could not be written, and are lost"))
}

#[test]
fn a_signal_ends_the_job_within_the_grace() {
    for (signal, number) in
        [(Signal::SIGTERM, 15), (Signal::SIGINT, 2), (Signal::SIGHUP, 1), (Signal::SIGQUIT, 3)]
    {
        let notes = Notes::new();
        let job = notes.job(1, "ulimit -c 0; fill");
        job.signal(signal);
        let (code, told) = job.ended_unread();
        assert_eq!(code, Some(128 + number), "{signal}: {told}");
        assert!(is_told(&told) && !told.contains("starting again"), "{told}");
        let killed = format!(" was killed by signal {number} ({signal})\n");
        assert!(told.ends_with(&killed), "{told}");
    }
}

/// The ranks wait in a write, and could not save otherwise.
#[test]
fn ranks_that_heed_a_signal_go_on_while_their_lines_are_lost() {
    let notes = Notes::new();
    let saved = notes.folder.path().join("saved");
    let script = format!("trap '' TERM; fill; echo > {}-$RANK; exit 0", saved.display());
    let job = notes.job(1, &script);
    job.signal(Signal::SIGTERM);
    let (code, told) = job.ended_unread();
    assert_eq!(code, Some(128 + 15), "{told}");
    assert!([0, 1].iter().all(|rank| notes.folder.path().join(format!("saved-{rank}")).exists()));
    assert!(is_told(&told), "{told}");
    assert!(told.ends_with("hsdp: attempt 0 was interrupted by SIGTERM\n"), "{told}");
}

#[test]
fn the_second_signal_kills_what_waits_in_a_write() {
    let notes = Notes::new();
    let job = notes.job(600, "trap '' TERM INT; fill; exit 3");
    job.signal(Signal::SIGTERM);
    job.signal(Signal::SIGINT);
    let (code, told) = job.ended_unread();
    assert_eq!(code, Some(128 + 9), "{told}");
    assert!(is_told(&told), "{told}");
    assert!(told.contains(" again: SIGKILL for ranks 0, 1\n"), "{told}");
}

/// Its lines wait, and its end is known nevertheless.
#[test]
fn a_rank_that_fails_ends_the_others_and_the_logs_have_all_lines() {
    let folder = TempDir::new().expect("a folder");
    let logs = folder.path().join("logs").display().to_string();
    let script =
        "exec 2>/dev/null; if [ $RANK = 1 ]; then trap '' TERM; while :; do sleep 0.05; done; fi; "
            .to_owned()
            + FITS
            + "exit 3";
    let options = [&NCCL[..], &["-n", "2", "--grace", "1", "--logs", &logs]].concat();
    let (code, told) = Job::start(&options, &script).ended_unread();
    assert_eq!(code, Some(3), "{told}");
    let first =
        "hsdp: rank 0 ended with exit code 3; the others get SIGTERM, and SIGKILL after 1 s\n";
    assert!(told.starts_with(first) && is_told(&told), "{told}");
    assert!(told.ends_with("hsdp: attempt 0 failed: rank 0 ended with exit code 3\n"), "{told}");
    let log = fs::read_to_string(format!("{logs}/attempt-0/rank-0.log")).expect("kept");
    assert_eq!(log, [1, 2, 3].map(|line| format!("{line:060000}\n")).concat());
}

#[test]
fn a_failure_is_followed_by_the_next_attempt() {
    let folder = TempDir::new().expect("a folder");
    let second = folder.path().join("second");
    let script =
        format!("if [ $HSDP_RESTART = 0 ]; then {FITS} exit 5; fi; echo > {}", second.display());
    let options = [&NCCL[..], &["-n", "1", "--grace", "1", "--restarts", "1"]].concat();
    let (code, told) = Job::start(&options, &script).ended_unread();
    assert!(second.exists(), "{told}");
    // A part of the output is lost, so the job is no success.
    assert_eq!(code, Some(1), "{told}");
    assert!(is_told(&told), "{told}");
    assert!(told.contains("starting again as attempt 1\n"), "{told}");
}

/// Checks the exit code of a launcher that can print on neither stream.
#[test]
fn a_stderr_that_stands_still_does_not_keep_the_job() {
    let notes = Notes::new();
    let fill = filling(&notes.of(0), 200);
    let options = [&NCCL[..], &["-n", "1", "--grace", "1"]].concat();
    let job = Job::start(&options, &(fill + "echo up; fill >&2"));
    until_still(&notes.of(0));
    job.signal(Signal::SIGTERM);
    assert_eq!(job.ended_untold(), (Some(128 + 15), "[0] up\n".to_owned()));
}

#[test]
fn both_streams_in_one_pipe_that_stands_still_do_not_keep_the_job() {
    for signals in [1, 2] {
        let notes = Notes::new();
        let fill = filling(&notes.of(0), 200);
        let script = fill + "(fill >&2) & fill; wait";
        let launch =
            command(&[&NCCL[..], &["-n", "1", "--grace", "1", "--", "sh", "-c", &script]].concat());
        let mut one = in_shell("exec \"$@\" 2>&1", &launch);
        let mut child = one.stdout(Stdio::piped()).spawn().expect("starts");
        until_still(&notes.of(0));
        let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a number"));
        for _ in 0..signals {
            nix::sys::signal::kill(pid, Signal::SIGTERM).expect("it is there");
        }
        let code = until_ended(&mut child);
        // Two signals at once may come before the first one is passed on.
        assert!(code == Some(128 + 15) || (signals == 2 && code == Some(128 + 9)), "{code:?}");
    }
}

/// The ranks have ended well, and their lines wait for a reader that nobody can hurry.
#[test]
fn a_signal_after_the_last_rank_ends_the_wait_for_the_reader() {
    let options = [&NCCL[..], &["-n", "1", "--grace", "1"]].concat();
    let mut job = Job::start(&options, &("echo $$; ".to_owned() + FITS));
    let pid = job.lines(1).remove(0)[4..].trim().to_owned();
    until_gone(&[pid]);
    job.signal(Signal::SIGTERM);
    let (code, told) = job.ended_unread();
    assert_eq!(code, Some(128 + 15), "{told}");
    assert!(is_told(&told), "{told}");
    assert!(told.ends_with("hsdp: attempt 0 was interrupted by SIGTERM\n"), "{told}");
}

#[test]
fn a_reader_that_has_read_enough_ends_no_rank() {
    let folder = TempDir::new().expect("a folder");
    let done = folder.path().join("done");
    let script = format!("yes | head -c 300000; echo > {}", done.display());
    let mut launch = command(&[&NCCL[..], &["-n", "1", "--", "sh", "-c", &script]].concat());
    launch.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = launch.spawn().expect("the program starts");
    drop(child.stdout.take());
    assert_eq!(until_ended(&mut child), Some(0));
    assert!(done.exists());
}

/// Starts the launcher as `nohup` does.
#[test]
fn a_signal_that_was_ignored_from_the_start_stays_ignored() {
    let folder = TempDir::new().expect("a folder");
    let go = folder.path().join("go");
    let script = format!("echo up; until [ -e {} ]; do sleep 0.02; done", go.display());
    let launch = command(&[&NCCL[..], &["-n", "1", "--", "sh", "-c", &script]].concat());
    let mut job = Job::spawn(in_shell("trap '' HUP; exec \"$@\"", &launch));
    assert_eq!(job.lines(1), ["[0] up\n"]);
    job.signal(Signal::SIGHUP);
    fs::write(go, "").expect("written");
    assert_eq!(job.ended(), (Some(0), String::new(), String::new()));
}

#[test]
fn an_mpirun_that_starts_nothing_does_not_keep_a_job_that_gets_a_signal() {
    let script = r#"#!/bin/sh
        if [ "$1" = --version ]; then echo "HYDRA build details:"; exit; fi
        trap '' TERM; echo up; while :; do sleep 0.05; done"#;
    let (_folder, path) = with_mpirun(script);
    let mut launch = command(&["launch", "-n", "2", "--grace", "1", "--", "true"]);
    launch.env("PATH", path);
    let mut job = Job::spawn(launch);
    assert_eq!(job.lines(1), ["[mpirun] up\n"]);
    job.signal(Signal::SIGTERM);
    let (code, told) = job.ended_unread();
    assert_eq!(code, Some(128 + 15), "{told}");
    let expected = "hsdp: SIGTERM is passed on to all ranks; a second signal kills them\n\
                    hsdp: rank 0 has not started: SIGKILL for the processes that start the ranks\n\
                    hsdp: attempt 0 was interrupted by SIGTERM: rank 0 had not started\n";
    assert_eq!(told, expected);
}

/// Somebody else may have set it: it belongs to all processes that have the file open.
#[test]
fn a_stdout_that_never_waits_takes_all_lines() {
    let script = "yes | head -c 300000";
    let (_, expected, _) = ran(&[&NCCL[..], &["-n", "1"]].concat(), script);
    let mut launch = command(&[&NCCL[..], &["-n", "1", "--", "sh", "-c", script]].concat());
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let set = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK);
    nix::fcntl::fcntl(&writer, set).expect("set");
    let mut running = launch.stdout(writer).spawn().expect("the program starts");
    drop(launch);
    let said = std::io::read_to_string(reader).expect("UTF-8");
    assert_eq!((until_ended(&mut running), said == expected), (Some(0), true));
}
