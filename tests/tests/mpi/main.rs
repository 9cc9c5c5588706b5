//! Ranks as processes under MPI: the conformance cases, training beside threads, and what goes
//! wrong between processes.
//!
//! ```text
//! cargo build -p hsdp-cli
//! cargo build -p hsdp-models --features mpi --example train_gpt --example finetune
//! cargo test -p hsdp-tests --features mpi --test mpi
//! ```

mod cases;
#[cfg(feature = "nccl")]
mod devices;
#[cfg(feature = "nccl")]
mod differing;
mod faults;
#[cfg(feature = "nccl")]
mod given_up;
mod hosts;
mod inputs;
mod job;
mod killed_for_memory;
#[cfg(feature = "nccl")]
mod one_order;
mod starting;
#[cfg(feature = "nccl")]
mod step_machine;
mod training;

use std::env;
use std::process::ExitCode;

use hsdp_train::tell;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    if env::var_os(starting::PROCESS).is_some() {
        return as_process(starting::as_process());
    }
    #[cfg(feature = "nccl")]
    if let Ok(scenario) = env::var(given_up::PROCESS) {
        return as_process(given_up::as_process(&scenario));
    }
    let arguments = Arguments::from_args();
    let on_one_host = [
        cases::TRIALS,
        training::TRIALS,
        starting::TRIALS,
        inputs::TRIALS,
        faults::TRIALS,
        killed_for_memory::TRIALS,
    ]
    .concat();
    let lacks = job::family().is_none().then_some("no mpirun");
    let lacks_hosts = lacks.or_else(hosts::lacks);
    let trials = on_one_host.into_iter().map(|trial| (trial, lacks));
    let trials = trials.chain(hosts::TRIALS.iter().map(|trial| (*trial, lacks_hosts)));
    let lacks_netem = lacks_hosts.or_else(hosts::lacks_netem);
    let trials = trials.chain([(hosts::ON_A_BAD_LINE, lacks_netem)]);
    let trials =
        trials.chain([(killed_for_memory::BY_THE_KERNEL, lacks.or_else(killed_for_memory::lacks))]);
    #[cfg(feature = "nccl")]
    let lacks_devices = lacks.or_else(devices::lacks);
    #[cfg(feature = "nccl")]
    let on_devices = [
        devices::TRIALS,
        given_up::TRIALS,
        differing::TRIALS,
        one_order::TRIALS,
        step_machine::TRIALS,
    ];
    #[cfg(feature = "nccl")]
    let trials = trials.chain(on_devices.concat().into_iter().map(|trial| (trial, lacks_devices)));
    let trial = |((name, run), lacks): (Named, Option<&str>)| {
        let trial = Trial::test(name, move || run().map_err(Failed::from));
        // What cannot be shown here is named, with the reason.
        match lacks {
            None => trial,
            Some(lacks) => trial.with_kind(lacks).with_ignored_flag(true),
        }
    };
    // Each takes all cores, and some look at the clock.
    let arguments = Arguments { test_threads: Some(1), ..arguments };
    libtest_mimic::run(&arguments, trials.map(trial).collect()).exit_code()
}

/// This program as a process of a job, which has ended so.
fn as_process(ended: Result<(), String>) -> ExitCode {
    ended.map_or_else(
        |error| {
            tell("mpi", error);
            ExitCode::from(2)
        },
        |()| ExitCode::SUCCESS,
    )
}

/// A test and its name.
type Named = (&'static str, fn() -> Result<(), String>);
