//! Trains a decoder on a mesh of replicas x shards: one in a folder of transformers, or a small one
//! from random weights.
//!
//! ```text
//! cargo run --release --example finetune
//! cargo run --release --example finetune -- --model DIR --batches FILE.safetensors --recompute \
//!     --out run --export tuned
//! cargo run --release --example finetune -- --model DIR --data TEXT --lora 8
//! ```
//!
//! In reading order: `train` (a rank's whole work, the code to copy into a program of your own),
//! `options`, `recipe`, `optimizers`, `inputs`, `folder` (a model of transformers), `data` with
//! `batches` and `text`, `report`, `export` with `peft`, and `shared` (the parts of every program
//! that trains: ranks, files, checkpoints, signals).

#![expect(clippy::disallowed_macros, reason = "the program has a subscriber")]

mod batches;
mod data;
mod export;
mod folder;
mod inputs;
mod optimizers;
mod options;
mod peft;
mod recipe;
mod report;
#[path = "../shared/mod.rs"]
mod shared;
mod text;
mod train;

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
use self::train::{Run, train};

/// The name of the program in its messages.
const NAME: &str = "finetune";

#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator::over(MiMalloc);

fn main() -> ExitCode {
    run().unwrap_or_else(|failure| failure.tell(NAME))
}

fn run() -> Result<ExitCode, Failure> {
    let options = Options::read().map_err(ranks::named)?;
    let with = (&options.run, shared::recipe::world(&options.run));
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
    let output = inputs.as_ref().ok().and_then(|(_, output)| output.as_ref());
    let inputs = inputs.as_ref().map(|(inputs, _)| inputs);
    let steps = inputs.map_or(0, |inputs| inputs.steps);
    let progress = ranks.has_first().then(|| Progress::new(steps, output, warnings)).transpose()?;
    let (run, ended) = train((options, inputs), ranks, (progress, warnings))?;
    let Ok(inputs) = inputs else { return Ok(()) };
    let reported = run.as_ref().map_or(Ok(()), |run| report(inputs, run, output));
    ended.after((NAME, reported), &inputs.signals, run.is_some())
}

/// Writes the files of rank 0, and prints its report. The files of `--out` stay as they are if all steps were made before this run.
fn report(inputs: &Inputs, run: &Run, output: Option<&Output>) -> Result<(), Failure> {
    if let Some(output) = output.filter(|_| !run.records.is_empty()) {
        output.finish(&report::summary(inputs, run), (&run.records, inputs.data.item()))?;
    }
    if let (Some(export), Some(parameters)) = (&inputs.export, &run.parameters) {
        export.write(inputs, parameters)?;
    }
    report::print(inputs, run)?;
    costs::check_traffic(&run.costs).map(drop)
}
