//! The comparison as a program: the options that it refuses, its output, and its failure.

mod common;

use std::process::Output;

use common::example;

fn run(arguments: &[&str]) -> Output {
    example("runtime_cost").args(arguments).output().expect("the program starts")
}

#[test]
fn what_leaves_nothing_to_compare_is_refused() {
    for (option, value) in [("--rounds", "0"), ("--steps", "0"), ("--steps", "1")] {
        let output = run(&[option, value]);
        assert_eq!(output.status.code(), Some(2), "{option} {value}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(option), "{option} {value}");
    }
}

#[test]
fn a_ratio_is_compared_and_the_time_accounted_for() {
    let small = ["--mesh", "1x2", "--rounds", "1", "--steps", "2"];
    for (most, code) in [("1e9", 0), ("0", 1), ("nan", 1)] {
        let output = run(&[&small[..], &["--at-most", most]].concat());
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "at most {most}: {said}");
        let (_, sharded) = said.split_once("a sharded step").expect("an account");
        for part in ["forward", "backward", "gather", "reduce", "finish", "optimizer"] {
            assert!(sharded.contains(&format!("{part}: ")), "no {part} in {sharded}");
        }
    }
}
