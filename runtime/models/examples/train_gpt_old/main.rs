//! Trains a character-level GPT on a mesh of replicas x shards whose ranks are threads or processes.
//!
//! ```text
//! cargo run --release --example train_gpt
//! cargo run --release --example train_gpt -- --mesh 2x3 --steps 50 --verify --out run
//! ```
//!
//! In reading order: `train` (a rank's whole work, the code to copy into a program of your own), `options`, `bounds`, `recipe`,
//! `inputs` and `text`, `verify`, `unsharded` and `update` (the unsharded twin), `report`, and `shared` (the parts of every program that
//! trains: ranks, files, checkpoints, signals). The modules import each other through `super`, because `tests/verify.rs` includes this
//! file as a module to run `tests`.

#![allow(
    clippy::disallowed_macros,
    reason = "the program has a subscriber; a test includes this file as a module, where an \
              expectation would not hold"
)]

mod bounds;
mod inputs;
mod options;
mod recipe;
mod report;
#[path = "../shared/mod.rs"]
mod shared;
#[cfg(test)]
mod tests;
mod text;
mod train;
mod unsharded;
mod update;
mod verify;

use std::process::ExitCode;

use hsdp::memory::CountingAllocator;
use hsdp_train::Warnings;
use mimalloc::MiMalloc;

use self::inputs::Inputs;
use self::options::Options;
use self::shared::failure::Failure;
use self::shared::options::Comm;
use self::shared::output::Output;
use self::shared::progress::Progress;
use self::shared::ranks::{self, Ranks};
use self::shared::trace::Recorder;
use self::shared::{costs, program};
use self::train::{Job, Run, train};

/// The name of the program in its messages.
const NAME: &str = "train_gpt";

#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator::over(MiMalloc);

fn main() -> ExitCode {
    run().unwrap_or_else(|failure| failure.tell(NAME))
}

fn run() -> Result<ExitCode, Failure> {
    let options = Options::read().map_err(ranks::named)?;
    let with = (&options.run, recipe::world(&options));
    program::run(NAME, with, |ranks, observers| run_on(ranks, &options, observers))
}

fn run_on(
    ranks: &Ranks,
    options: &Options,
    (recorder, warnings): (&Recorder, &Warnings),
) -> Result<(), Failure> {
    let inputs = Inputs::read(ranks, options, recorder);
    // Other processes wait for this one: they learn of its problem where they meet.
    let inputs = if options.run.comm == Comm::Threads { Ok(inputs?) } else { inputs };
    let output = inputs.as_ref().ok().and_then(Inputs::output);
    // Only rank 0 shows progress. Another process would draw its bar around each of its warnings.
    let progress = ranks.has_first().then(|| Progress::new(options.steps, output, warnings));
    let progress = progress.transpose()?;
    let job = inputs.as_ref().map(|inputs| inputs.job(warnings));
    let job = job.as_ref().map_err(|failure| *failure);
    let (run, ended) = train((options, job), ranks, progress)?;
    let Ok(job) = job else { return Ok(()) };
    let reported = run.as_ref().map_or(Ok(()), |run| report(job, run, output));
    ended.after((NAME, reported), &job.signals, run.is_some())
}

/// Writes the files of rank 0, and prints its report. The files stay as they are if all steps were made before this run.
fn report(job: &Job<'_>, run: &Run, output: Option<&Output>) -> Result<(), Failure> {
    if run.records.is_empty() {
        return report::print(job, run);
    }
    // The files come first: a stdout that takes no more does not lose them.
    if let Some(output) = output {
        output.finish(&report::summary(job, run), (&run.records, "character"))?;
    }
    report::print(job, run)?;
    costs::check_traffic(&run.costs)?;
    Ok(())
}
