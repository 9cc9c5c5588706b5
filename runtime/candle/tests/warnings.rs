//! The examples as programs that show the warnings of the libraries.

#![cfg(unix)]

mod common;

use std::process::Output;
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;

use common::example;
use common::place::{Running, ended_well};

/// Runs a program that is stopped for longer than its ranks take for a hiccup, again and again: some rank waits then.
fn interrupted(program: &str, arguments: &[&str]) -> Output {
    let mut command = example(program);
    command.args(arguments).env("RAYON_NUM_THREADS", "1");
    let mut run = Running::of(command);
    while run.is_running() {
        thread::park_timeout(Duration::from_millis(300));
        if !run.is_running() {
            break;
        }
        run.stop();
        thread::park_timeout(Duration::from_millis(700));
        run.send(Signal::SIGCONT);
    }
    let ended = run.ended();
    ended_well(&ended);
    let said = String::from_utf8_lossy(&ended.stderr);
    let warning = format!("{program}: warning: the process was stopped, or got no processor time");
    assert!(said.contains(&warning), "{said}");
    ended
}

#[test]
fn contrastive_counts_them_in_its_report() {
    let ended = interrupted("contrastive", &["--steps", "1000"]);
    let report = String::from_utf8_lossy(&ended.stdout);
    let count = report.lines().filter_map(|line| line.trim().strip_prefix("warnings "));
    let counts: Vec<u64> = count.map(|count| count.trim().parse().expect("a number")).collect();
    assert!(matches!(*counts, [1..=u64::MAX]), "{report}");
}

#[test]
fn runtime_cost_shows_them() {
    let short = ["--only", "sharded", "--mesh", "1x2", "--rounds", "1", "--steps", "80"];
    interrupted("runtime_cost", &short);
}
