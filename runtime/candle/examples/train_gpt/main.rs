//! Trains a character-level GPT on a mesh of replicas x shards whose ranks are threads or processes.
//!
//! ```text
//! cargo run --release --example train_gpt
//! cargo run --release --example train_gpt -- --mesh 2x3 --steps 50 --verify --out run
//! ```
//!
//! In reading order: `train` (a rank's whole work, the code to copy into a program of your own), `options`, `bounds`, `recipe`,
//! `ranks`, `inputs` and `text`, `device`, `verify`, `unsharded` and `update` (the unsharded twin), `costs` and `report` (plan against
//! measurement), `output`, `plot`, `saving` and `signals` (checkpoints), `trace` and `switch`, `threads`. The modules import each other
//! through `super`, because `tests/verify.rs` includes this file as a module to run `tests`.

mod bounds;
mod costs;
mod device;
mod failure;
mod inputs;
mod options;
mod output;
mod plot;
mod progress;
mod ranks;
mod recipe;
mod report;
mod saving;
mod signals;
mod size;
mod switch;
#[cfg(test)]
mod tests;
mod text;
mod threads;
mod trace;
mod train;
mod unsharded;
mod update;
mod verify;

use std::process::ExitCode;

use hsdp::memory::CountingAllocator;
use hsdp_program::Warnings;

use self::failure::Failure;
use self::inputs::Inputs;
use self::options::{Comm, Options};
use self::output::Output;
use self::progress::Progress;
use self::ranks::Ranks;
use self::trace::Recorder;
use self::train::{Ended, Job, Run, train};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    run().unwrap_or_else(|failure| failure.tell())
}

fn run() -> Result<ExitCode, Failure> {
    let options = Options::read().map_err(ranks::named)?;
    threads::divide_cores(options.mesh.world_size()).map_err(Failure::training)?;
    let warnings = Warnings::of("train_gpt");
    let recorder = Recorder::listen(&warnings)?;
    let ranks = Ranks::of(&options)?;
    if let Some(rank) = ranks.of_process() {
        warnings.set_rank(rank);
    }
    let train = || run_on(&ranks, &options, (&recorder, &warnings));
    let trained = ranks.check(&options).and_then(|()| train());
    // The failure is printed before the ranks end: a launcher kills the others as soon as one process is gone.
    Ok(trained.map_or_else(|failure| failure.tell(), |()| ExitCode::SUCCESS))
}

fn run_on(
    ranks: &Ranks,
    options: &Options,
    (recorder, warnings): (&Recorder, &Warnings),
) -> Result<(), Failure> {
    let inputs = Inputs::read(ranks, options, recorder);
    // Other processes wait for this one: they learn of its problem where they meet.
    let inputs = if options.comm == Comm::Threads { Ok(inputs?) } else { inputs };
    let output = inputs.as_ref().ok().and_then(Inputs::output);
    // Only rank 0 shows progress. Another process would draw its bar around each of its warnings.
    let progress = ranks.has_first().then(|| Progress::new(options.steps, output, warnings));
    let progress = progress.transpose()?;
    let job = inputs.as_ref().map(|inputs| inputs.job(warnings));
    let job = job.as_ref().map_err(|failure| *failure);
    let ended = train((options, job), ranks, progress)?;
    let Ok(job) = job else { return Ok(()) };
    let reported = ended.run.as_ref().map_or(Ok(()), |run| report(job, run, output));
    let ended = outcome(job, ended);
    if let (Err(_), Err(failure)) = (&reported, &ended) {
        failure.tell();
    }
    reported.and(ended)
}

/// Writes the files of rank 0, and prints its report. The files stay as they are if all steps were made before this run.
fn report(job: &Job<'_>, run: &Run, output: Option<&Output>) -> Result<(), Failure> {
    if run.records.is_empty() {
        return report::print(job, run);
    }
    // The files come first: a stdout that takes no more does not lose them.
    if let Some(output) = output {
        output.finish(job, run)?;
    }
    report::print(job, run)?;
    costs::check_traffic(&run.costs)?;
    Ok(())
}

/// The end of a run, whose report may have failed: it fails if the last checkpoint was not saved, or a signal has ended it.
fn outcome(job: &Job<'_>, ended: Ended) -> Result<(), Failure> {
    let signal = job.signals.caught();
    let stopped = ended.was_stopped.then_some(Failure::Stopped { signal, steps: ended.steps });
    match (ended.unsaved, stopped) {
        (None, None) => Ok(()),
        // Rank 0 is still writing its files, and a launcher would kill it.
        _ if ended.run.is_none() => Err(Failure::Elsewhere),
        (None, Some(stopped)) => Err(stopped),
        (Some(problem), None) => {
            Err(Failure::Training(format!("the last checkpoint was not saved: {problem}")))
        }
        (Some(problem), Some(stopped)) => {
            Err(Failure::Training(format!("{stopped}, and no checkpoint was saved: {problem}")))
        }
    }
}
