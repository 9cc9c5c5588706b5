//! Trains a character-level GPT on a mesh of replicas x shards whose ranks are threads.
//!
//! ```text
//! cargo run --release --example train_gpt
//! cargo run --release --example train_gpt -- --mesh 2x3 --steps 50 --verify --out run
//! ```
//!
//! In reading order: `train` (a rank's whole work, and what an embedder copies), `options`, `text`,
//! `verify` (the unsharded twin), `costs` and `report` (plan against measurement), `output`,
//! `plot`, `trace`, `threads`.

mod costs;
mod failure;
mod options;
mod output;
mod plot;
mod progress;
mod report;
mod size;
mod text;
mod threads;
mod trace;
mod train;
mod unsharded;
mod verify;

use std::process::ExitCode;

use hsdp_candle::gpt::{Gpt, GptConfig};
use hsdp_kernels::memory::CountingAllocator;

use crate::failure::Failure;
use crate::options::Options;
use crate::output::Output;
use crate::progress::Progress;
use crate::text::Corpus;
use crate::train::{Job, train};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            #[expect(clippy::print_stderr, reason = "this is where the program tells its user")]
            {
                eprintln!("train_gpt: {failure}");
            }
            failure.exit_code()
        }
    }
}

fn run() -> Result<(), Failure> {
    let options = Options::read()?;
    let corpus = Corpus::read(&options)?;
    let Options { layers, width, heads, context, .. } = options;
    let config = GptConfig { vocab: corpus.vocabulary(), context, width, heads, layers };
    let gpt = Gpt::new(config).map_err(Failure::input)?;
    // From here on there are threads, and files.
    threads::divide_cores(options.mesh.world_size()).map_err(Failure::training)?;
    let output = options.out.as_deref().map(Output::create).transpose()?;

    let job = Job { options: &options, corpus: &corpus, gpt };
    let run = train(&job, Progress::new(options.steps, output.as_ref())?)?;
    report::print(&job, &run)?;
    match output {
        Some(output) => output.finish(&job, &run),
        None => Ok(()),
    }
}
