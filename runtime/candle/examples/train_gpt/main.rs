//! Trains a character-level GPT on a mesh of replicas x shards whose ranks are threads or processes.
//!
//! ```text
//! cargo run --release --example train_gpt
//! cargo run --release --example train_gpt -- --mesh 2x3 --steps 50 --verify --out run
//! ```
//!
//! In reading order: `train` (a rank's whole work, the code to copy into a program of your own), `options`, `recipe`,
//! `ranks`, `text`, `device`, `verify`, `unsharded` and `update` (the unsharded twin), `costs` and `report` (plan against
//! measurement), `output`, `plot`, `saving` and `signals` (checkpoints), `trace`, `threads`. The modules import each other
//! through `super`, because `tests/verify.rs` includes this file as a module to run `tests`.

mod costs;
mod device;
mod failure;
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
use hsdp_candle::gpt::{Gpt, GptConfig};

use self::failure::Failure;
use self::options::{Comm, Options};
use self::output::Output;
use self::progress::Progress;
use self::ranks::Ranks;
use self::signals::Signals;
use self::text::Corpus;
use self::train::{Job, Run, train};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    run().unwrap_or_else(|failure| tell(&failure))
}

fn tell(failure: &Failure) -> ExitCode {
    if failure.is_told() {
        #[expect(clippy::print_stderr, reason = "this is where the program tells its user")]
        {
            eprintln!("train_gpt: {failure}");
        }
    }
    failure.exit_code()
}

fn run() -> Result<ExitCode, Failure> {
    let options = Options::read()?;
    let corpus = Corpus::read(&options)?;
    let Options { layers, width, heads, context, .. } = options;
    let config = GptConfig { vocab: corpus.vocabulary(), context, width, heads, layers };
    let gpt = Gpt::new(config).map_err(Failure::input)?;
    // The input is checked. Threads and files exist only from here on.
    threads::divide_cores(options.mesh.world_size()).map_err(Failure::training)?;
    let ranks = Ranks::of(&options)?;
    let trained = run_on(&ranks, options, &corpus, gpt);
    // The failure is printed before the ranks end: a launcher kills the others as soon as one process is gone.
    Ok(trained.map_or_else(|failure| tell(&failure), |()| ExitCode::SUCCESS))
}

fn run_on(ranks: &Ranks, options: Options, corpus: &Corpus, gpt: Gpt) -> Result<(), Failure> {
    let device = if options.comm == Comm::Threads {
        options.device
    } else {
        device::of_process(options.device)?
    };
    let options = Options { device, ..options };
    let out = options.out.as_deref().filter(|_| ranks.has_first());
    let output = out.map(Output::create).transpose()?;

    let signals = Signals::listen().map_err(Failure::training)?;
    let job = Job { options: &options, corpus, gpt, signals };
    let ended = train(&job, ranks, Progress::new(options.steps, output.as_ref())?)?;
    ended.run.as_ref().map_or(Ok(()), |run| report(&job, run, output))?;
    match ended.was_stopped {
        true => Err(Failure::Stopped { signal: job.signals.caught(), steps: ended.steps }),
        false => Ok(()),
    }
}

/// Prints the report of rank 0, and writes its files.
fn report(job: &Job<'_>, run: &Run, output: Option<Output>) -> Result<(), Failure> {
    let options = job.options;
    if run.records.is_empty() {
        return Err(Failure::Input(format!("--resume: all {} steps are made", options.steps)));
    }
    report::print(job, run)?;
    if let Some(output) = output {
        output.finish(job, run)?;
    }
    costs::check_traffic(&run.costs)?;
    Ok(())
}
