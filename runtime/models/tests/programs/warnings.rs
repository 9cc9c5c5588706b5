//! The examples as programs that show the warnings of the libraries.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::example;
use crate::place::Running;

/// Longer than a rank that waits takes for a hiccup, wherever the stop falls between two of its
/// looks.
const STOP: Duration = Duration::from_millis(800);

/// Between two stops.
const BETWEEN: Duration = Duration::from_millis(50);

/// Some rank waits at one in five moments or more. The first stops may come before there are ranks.
const MOST_STOPS: usize = 100;

/// Starts a program, and stops it for a while again and again, until it says so: some rank waited
/// then. Also returns what it says afterwards.
fn interrupted(program: &str, arguments: &[&str]) -> (Running, Receiver<String>) {
    let mut command = example(program);
    command.args(arguments).env("RAYON_NUM_THREADS", "1");
    let mut run = Running::of(command);
    let lines = run.stderr_lines();
    let warning = format!("{program}: warning: the process was stopped, or got no processor time");
    for _ in 0..MOST_STOPS {
        match lines.recv_timeout(BETWEEN) {
            Ok(line) if line.starts_with(&warning) => return (run, lines),
            Ok(_) => continue,
            Err(RecvTimeoutError::Disconnected) => panic!("it ends without a warning"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        run.stop();
        thread::park_timeout(STOP);
        run.send(Signal::SIGCONT);
    }
    panic!("it was stopped {MOST_STOPS} times, without a warning");
}

#[test]
fn contrastive_counts_them_in_its_report() {
    let (run, lines) = interrupted("contrastive", &["--steps", "300"]);
    let ended = run.ended();
    assert!(ended.status.success(), "{}: {:?}", ended.status, lines.iter().collect::<Vec<_>>());
    let report = String::from_utf8_lossy(&ended.stdout);
    let count = report.lines().filter_map(|line| line.trim().strip_prefix("warnings "));
    let counts: Vec<u64> = count.map(|count| count.trim().parse().expect("a number")).collect();
    assert!(matches!(*counts, [1..=u64::MAX]), "{report}");
}
