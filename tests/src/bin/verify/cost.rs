//! `verify cost`: a sharded step beside the same threads, each with the whole model.
//!
//! Both sides have the same threads, batches, model code, and kernel of AdamW, at the sizes of
//! `train_gpt`. The plain side ([`plain`]) has no collectives: ranks add up one another's gradients
//! in shared memory, each a part. The two alternate, and take turns to be the first, so that other
//! load on the machine affects both alike. One more run of each, which is not compared, measures
//! the parts of a step ([`account`]).

mod account;
mod parts;
mod plain;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::Device;
use clap::{Args, Parser as _, ValueEnum};
use hsdp::prelude::*;
use hsdp_models::gpt;
use hsdp_train::number::count;
use hsdp_train::{Failure, Place, Warnings, print, threads};
use tracing::info_span;

use self::account::Account;
use crate::NAME;
use crate::train_gpt::{self, Inputs};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Mesh of replicas x shards; the product is the number of threads, at most 64
    #[arg(long, default_value = "2x2")]
    mesh: Mesh,
    /// Number of runs of each side, at most 1000
    #[arg(long, default_value_t = 5, value_parser = count::<1, 1000>)]
    rounds: usize,
    /// Number of steps in a run, at most 1000000; the first is not counted
    #[arg(long, default_value_t = 20, value_parser = count::<2, 1_000_000>)]
    steps: usize,
    /// Fail if the median sharded step takes more than RATIO times the median plain one; no limit
    /// by default
    #[arg(long, value_name = "RATIO")]
    at_most: Option<f64>,
    /// Run one side only, for a profiler, and print nothing; by default both sides run and are
    /// compared
    #[arg(long, conflicts_with = "at_most")]
    only: Option<Side>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Side {
    Plain,
    Sharded,
}

/// The work of both sides.
#[derive(Debug)]
struct Work {
    mesh: Mesh,
    steps: usize,
    options: train_gpt::Options,
    inputs: Inputs,
}

/// Times of steps, on rank 0.
type Times = Vec<Duration>;

/// Measures, and prints the ratio.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let mesh = options.mesh;
    let steps = options.steps;
    threads::check(mesh.world_size(), threads::IN_EXAMPLES)
        .map_err(|problem| Failure::Input(format!("mesh {mesh} has {problem}")))?;
    hsdp_train::prepare(mesh.world_size())?;
    let account = Account::listen(&Warnings::of(NAME))?;
    // A text has about this many different characters. Their order does not matter for the time.
    let text: String = (0..4096_u32).filter_map(|at| char::from_u32(32 + at * 37 % 95)).collect();
    let mut gpt = train_gpt::Options::parse_from([NAME]);
    (gpt.run.mesh, gpt.steps) = (mesh, steps);
    let work = Work { mesh, steps, inputs: Inputs::new(&gpt, &text)?, options: gpt };
    if let Some(side) = options.only {
        for _ in 0..options.rounds {
            side.run(&work)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let ratio = compare(&work, options.rounds)?;
    show_accounts(&work, &account)?;
    match options.at_most {
        None => Ok(ExitCode::SUCCESS),
        Some(most) if ratio <= most => Ok(ExitCode::SUCCESS),
        // A NaN does not pass.
        Some(most) => {
            Err(Failure::Work(format!("the ratio is {ratio:.6}: --at-most allows {most}")))
        }
    }
}

impl Side {
    fn run(self, work: &Work) -> Result<Times, Failure> {
        match self {
            Self::Plain => plain::run(work),
            Self::Sharded => sharded(work),
        }
    }
}

/// Returns the median sharded step over the median plain one.
fn compare(work: &Work, rounds: usize) -> Result<f64, Failure> {
    let mut plain_times = Times::new();
    let mut sharded_times = Times::new();
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
    let mesh = work.mesh;
    let ratio = sharded / plain;
    print(format_args!(
        "median step on mesh {mesh}: plain {plain:.2} ms, sharded {sharded:.2} ms, ratio {ratio:.3}"
    ))?;
    Ok(ratio)
}

/// Runs the plain and the sharded side; in every second round the sharded side goes first.
fn run_both(work: &Work, round: usize) -> Result<(Times, Times), Failure> {
    if round.is_multiple_of(2) {
        let sharded = Side::Sharded.run(work)?;
        return Ok((Side::Plain.run(work)?, sharded));
    }
    Ok((Side::Plain.run(work)?, Side::Sharded.run(work)?))
}

/// Runs each side once more, and prints the parts of its steps.
fn show_accounts(work: &Work, account: &Account) -> Result<(), Failure> {
    account.open();
    let counted = (work.steps - 1) * work.mesh.world_size();
    for (side, name) in [(Side::Plain, "plain"), (Side::Sharded, "sharded")] {
        side.run(work)?;
        print(format_args!("a {name} step, mean of all ranks:\n{}", account.take(counted)))?;
    }
    account.close();
    Ok(())
}

/// Returns the median in milliseconds.
fn median(times: &[Duration]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}

/// Trains on sharded parameters, and times the steps of rank 0.
fn sharded(work: &Work) -> Result<Times, Failure> {
    let Work { options, inputs, .. } = work;
    let times = threads::run(work.mesh.world_size(), WorldOptions::default(), |world| {
        let spec = inputs.gpt.config().spec();
        let init = |param: &Param| gpt::init(param, options.seed);
        let mut model = ShardedModel::new(world, spec, options.run.model(), init)?;
        let mut adamw = AdamW::new(&model, train_gpt::recipe(options));
        timed(work, |number| {
            let rank = model.rank();
            let begin = StepOptions {
                weight_hint: Some(options.tokens()),
                ..StepOptions::microbatches(options.run.microbatches)
            };
            let mut step = info_span!("begin").in_scope(|| model.begin_step(begin))?;
            for microbatch in 0..options.run.microbatches {
                let pass = step.microbatch()?;
                let place = Place { step: number, microbatch, rank };
                train_gpt::microbatch(options, inputs, &Device::Cpu, pass, place)?;
            }
            let gradients = info_span!("finish").in_scope(|| step.finish())?;
            let update = || train_gpt::update(options, &mut model, &mut adamw, gradients);
            info_span!("optimizer").in_scope(update)?;
            Ok(())
        })
    })?;
    Ok(times.into_iter().next().unwrap_or_default())
}

/// Makes the steps of a rank, and returns their times but for the first.
fn timed(work: &Work, mut step: impl FnMut(u64) -> Result<(), Failure>) -> Result<Times, Failure> {
    let mut times = Times::new();
    for number in 0..work.steps as u64 {
        let start = Instant::now();
        account::counted(number).in_scope(|| step(number))?;
        times.push(start.elapsed());
    }
    Ok(times.split_off(1))
}
