//! Trains two towers to find the views of the same point among all ranks' pairs, and with `--verify` the same on one rank.
//!
//! ```text
//! cargo run --release --example contrastive
//! cargo run --release --example contrastive -- --ranks 8 --dtype f64 --verify
//! ```
//!
//! The loss of a rank's pairs needs the embeddings of all ranks' pairs: they are gathered, and gradients flow back through
//! the gather. No wrapper is involved: by their types, parameters are Replicate and their gradients Partial.
//!
//! In reading order: `model` (the towers and the loss), `train` (a rank's whole work), `sgd`, `data`, `options`; `twin` and
//! `verify` (one rank with the whole batch, in plain candle), `report`, `failure`, `environment`.

mod data;
#[path = "../shared/environment.rs"]
mod environment;
mod failure;
mod model;
mod options;
mod report;
mod sgd;
mod train;
mod twin;
mod verify;

use std::process::ExitCode;

use hsdp_train::{Failure, Warnings};
use mimalloc::MiMalloc;

use self::options::Options;
use self::report::Progress;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    hsdp_train::program("contrastive", || run().map(|()| ExitCode::SUCCESS))
}

fn run() -> Result<(), Failure> {
    let options = Options::read()?;
    environment::set(options.ranks).map_err(Failure::work)?;
    let warnings = Warnings::of("contrastive");
    warnings.listen().map_err(Failure::work)?;
    let progress = Progress::new(options.steps, &warnings)?;
    let run = train::train(&options, progress)?;
    Ok(hsdp_train::print(report::text(&options, &run, warnings.count()))?)
}
