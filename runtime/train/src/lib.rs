//! The surroundings of a training loop: the parts of a program that are the same for every model.
//!
//! A program that trains through [`main`] gets the options of [`RunOptions`] on its command line.
//! Its ranks are threads or processes. It
//!
//! - shows a progress bar with the loss, the tokens a second and the time left;
//! - keeps `metrics.jsonl`, `summary.json`, `loss.svg` and a trace in a folder, which one run at a
//!   time uses;
//! - saves checkpoints and resumes from them;
//! - ends after the current step on SIGINT or SIGTERM;
//! - shows each warning of the libraries once;
//! - ends with an exit code, and with one line on stderr if it fails.
//!
//! The gradients may come from anywhere: this crate depends on no autograd.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use hsdp::prelude::*;
//! use hsdp_train::{Failure, Place, Ranks, RunOptions, Training};
//!
//! #[derive(clap::Parser)]
//! struct Options {
//!     #[command(flatten)]
//!     run: RunOptions,
//! }
//!
//! fn main() -> ExitCode {
//!     hsdp_train::main("mine", |options: &Options| &options.run, train)
//! }
//!
//! fn train(_: &Options, ranks: &Ranks) -> Result<(), Failure> {
//!     let read = || Ok(vec![0.5_f32; 100]); // once in each process
//!     ranks.run(read, |setup, data| {
//!         let spec = ModelSpec::new().unit(Unit::new("layer").param(Param::new("w", [2])));
//!         let init = |_: &Param| vec![0.0; 2];
//!         let model = ShardedModel::new(setup.world(), spec, setup.model_options(), init)?;
//!         let adamw = AdamW::new(&model, AdamWOptions::default());
//!         let mut run = setup.start(model, adamw, Training::of_steps(200))?;
//!         while run.next_step()?.is_some() {
//!             let gradients = run.gradients(|pass, place| microbatch(pass, data, place))?;
//!             run.update(|model, adamw| adamw.step(model, gradients.clip(1.0)))?;
//!         }
//!         run.finish()
//!     })
//! }
//!
//! fn microbatch(pass: Pass<'_>, data: &[f32], place: Place) -> Result<(), hsdp::Error> {
//! #   let _ = (data, place);
//!     // ... forward, loss, backward
//!     pass.finish()
//! }
//! ```
//!
//! The other modules are for all programs of this project, including those that do not train.
//!

#![doc = include_str!("../BOUNDS.md")]

pub mod command_line;
mod failure;
pub mod file;
mod folder;
mod lock;
pub mod memory;
pub mod number;
mod options;
mod ranks;
mod run;
mod setup;
mod signals;
pub mod stderr;
pub mod stdout;
pub mod testing;
pub mod threads;
mod warnings;

use hsdp::memory::CountingAllocator;
use mimalloc::MiMalloc;

pub use self::failure::{Failure, program};
pub use self::file::Digest;
pub use self::folder::Switch;
pub use self::options::{
    Comm, EvaluationOptions, MAX_MICROBATCHES, MAX_STEPS, MAX_UNITS, Place, RunOptions,
};
pub use self::ranks::{Ranks, main, prepare, with_ranks};
pub use self::run::{Better, Report, Run, Training, bar};
pub use self::setup::Setup;
pub use self::stderr::{tell, tell_with, tell_within};
pub use self::stdout::{print, print_json};
pub use self::warnings::Warnings;

/// An allocator that keeps freed memory, which saves a tenth of a step, and that counts the memory
/// of each rank for the report.
pub type Allocator = CountingAllocator<MiMalloc>;

/// Creates the allocator, for use as the global one:
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: hsdp_train::Allocator = hsdp_train::allocator();
/// ```
#[must_use]
pub const fn allocator() -> Allocator {
    CountingAllocator::over(MiMalloc)
}
