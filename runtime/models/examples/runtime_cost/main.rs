//! The cost of the runtime: a sharded step against the same threads, each with the whole model.
//!
//! ```text
//! cargo run --release --example runtime_cost
//! ```
//!
//! Both sides have the same threads, batches, model code, and kernel of AdamW, at the sizes of
//! `train_gpt`. The plain side ([`plain`]) has no collectives: ranks add up one another's gradients
//! in shared memory, each a part. The two alternate, and take turns to be the first, so that other
//! load on the machine affects both alike. One more run of each, which is not compared, measures the
//! parts of a step ([`account`]).

mod account;
mod data;
#[path = "../shared/environment.rs"]
mod environment;
mod plain;
mod sharded;
#[path = "../shared/size.rs"]
mod size;
#[path = "../shared/switch.rs"]
mod switch;
#[path = "../train_gpt/update.rs"]
mod update;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use hsdp::prelude::*;
use hsdp_models::gpt::{Gpt, GptConfig};
use hsdp_train::number::count;
use hsdp_train::{Failure, Warnings, command_line, print};
use mimalloc::MiMalloc;

use crate::account::Account;

/// Measures a sharded training step against the same threads that each train on the whole model.
#[derive(Debug, Parser)]
#[command(name = "runtime_cost")]
struct Options {
    /// Mesh of replicas x shards; the product is the number of threads, at most 64
    #[arg(long, default_value = size::MESH)]
    mesh: Mesh,
    /// Number of runs of each side, at most 1000
    #[arg(long, default_value_t = 5, value_parser = count::<1, 1000>)]
    rounds: usize,
    /// Number of steps in a run, at most 1000000; the first is not counted
    #[arg(long, default_value_t = 20, value_parser = count::<2, 1_000_000>)]
    steps: usize,
    /// Fail if the median sharded step takes more than RATIO times the median plain one; no limit by default
    #[arg(long, value_name = "RATIO")]
    at_most: Option<f64>,
    /// Run one side only, for a profiler, and print nothing; by default both sides run and are compared
    #[arg(long, conflicts_with = "at_most")]
    only: Option<Side>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Side {
    Plain,
    Sharded,
}

/// The work of both sides.
#[derive(Clone, Copy, Debug)]
struct Work {
    gpt: Gpt,
    mesh: Mesh,
    steps: usize,
    adamw: AdamWOptions,
}

/// Times of steps, on rank 0.
type Times = Vec<Duration>;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    hsdp_train::program("runtime_cost", || {
        let options: Options = command_line::read()?;
        let ranks = options.mesh.world_size();
        hsdp_train::threads::check(ranks, hsdp_train::threads::IN_EXAMPLES)
            .map_err(|problem| Failure::Input(format!("mesh {} has {problem}", options.mesh)))?;
        run(&options).map_err(Failure::work)
    })
}

fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    environment::set(options.mesh.world_size())?;
    let account = Account::listen(&Warnings::of("runtime_cost"))?;
    let config = GptConfig {
        vocab: data::VOCABULARY,
        context: size::CONTEXT,
        width: size::WIDTH,
        heads: size::HEADS,
        layers: size::LAYERS,
    };
    let work = Work {
        gpt: Gpt::new(config)?,
        mesh: options.mesh,
        steps: options.steps,
        adamw: AdamWOptions::default(),
    };
    if let Some(side) = options.only {
        for _ in 0..options.rounds {
            side.run(&work)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let ratio = compare(&work, options.rounds)?;
    show_accounts(&work, &account)?;
    // Not the other way around: a NaN must not pass.
    let passes = options.at_most.is_none_or(|most| ratio <= most);
    Ok(if passes { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Side {
    fn run(self, work: &Work) -> Result<Times, Box<dyn Error>> {
        match self {
            Self::Plain => plain::run(work),
            Self::Sharded => sharded::run(work),
        }
    }
}

/// The median sharded step over the median plain one.
fn compare(work: &Work, rounds: usize) -> Result<f64, Box<dyn Error>> {
    let (mut plain_times, mut sharded_times) = (Times::new(), Times::new());
    for round in 1..=rounds {
        let (plain, sharded) = run_both(work, round)?;
        let [one, other] = [median(&plain), median(&sharded)];
        print(format_args!(
            "round {round}: plain {one:.2} ms, sharded {other:.2} ms, ratio {:.3}",
            other / one
        ))?;
        plain_times.extend(plain);
        sharded_times.extend(sharded);
    }
    let [plain, sharded] = [median(&plain_times), median(&sharded_times)];
    let (mesh, ratio) = (work.mesh, sharded / plain);
    print(format_args!(
        "median step on mesh {mesh}: plain {plain:.2} ms, sharded {sharded:.2} ms, ratio {ratio:.3}"
    ))?;
    Ok(ratio)
}

/// Plain and sharded; in every second round the sharded side goes first.
fn run_both(work: &Work, round: usize) -> Result<(Times, Times), Box<dyn Error>> {
    if round.is_multiple_of(2) {
        let sharded = Side::Sharded.run(work)?;
        return Ok((Side::Plain.run(work)?, sharded));
    }
    Ok((Side::Plain.run(work)?, Side::Sharded.run(work)?))
}

/// Runs each side once more, and prints the parts of its steps.
fn show_accounts(work: &Work, account: &Account) -> Result<(), Box<dyn Error>> {
    account.open();
    let counted = (work.steps - 1) * work.mesh.world_size();
    for (side, name) in [(Side::Plain, "plain"), (Side::Sharded, "sharded")] {
        side.run(work)?;
        print(format_args!("a {name} step, mean of all ranks:\n{}", account.take(counted)))?;
    }
    account.close();
    Ok(())
}

/// The median in milliseconds.
fn median(times: &[Duration]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}
