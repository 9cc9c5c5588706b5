//! Ranks as processes under MPI: the conformance cases, training beside threads, and what goes wrong between processes.
//!
//! ```text
//! cargo build -p hsdp-candle --features mpi --example train_gpt
//! cargo test -p hsdp-tests --features mpi --test mpi
//! ```

mod cases;
mod faults;
mod job;
mod training;

use std::process::Command;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let is_there = Command::new("mpirun").arg("--version").output().is_ok();
    let trials = [cases::TRIALS, training::TRIALS, faults::TRIALS].concat();
    let trial = |(name, run): (&'static str, fn() -> Result<(), String>)| {
        let trial = Trial::test(name, move || run().map_err(Failed::from));
        // Without mpirun nothing of this can be shown.
        if is_there { trial } else { trial.with_kind("no mpirun here").with_ignored_flag(true) }
    };
    // Each takes all cores, and some look at the clock.
    let arguments = Arguments { test_threads: Some(1), ..arguments };
    libtest_mimic::run(&arguments, trials.into_iter().map(trial).collect()).exit();
}

/// A test and its name.
type Named = (&'static str, fn() -> Result<(), String>);
