//! Proofs about the examples: the same training without the runtime, beside the ranks.
//!
//! ```text
//! cargo run --release -p hsdp-tests --bin verify -- gpt --mesh 2x3 --steps 50
//! cargo run --release -p hsdp-tests --bin verify -- contrastive --ranks 8 --dtype f64
//! cargo run --release -p hsdp-tests --bin verify -- cost
//! ```

mod contrastive;
mod cost;
mod gpt;
#[path = "../../../../runtime/models/examples/train_gpt.rs"]
#[expect(dead_code, reason = "the functions that only `main` calls")]
mod train_gpt;

use std::process::ExitCode;

use clap::Parser;
use hsdp_train::command_line;

const NAME: &str = "verify";

/// Runs the same training with and without the runtime, and exits with 1 if they differ
#[derive(Debug, Parser)]
#[command(name = "verify", version)]
enum Proof {
    /// Trains as `train_gpt`, and beside it the same model without shards; in each step the other
    /// ranks wait for the model without shards at most for the seconds of --deadline
    Gpt(train_gpt::Options),
    /// Trains as `contrastive`, and beside it one rank with the whole batch
    Contrastive(contrastive::Options),
    /// Measures a step of `train_gpt` beside the same threads, each with the whole model
    Cost(cost::Options),
}

fn main() -> ExitCode {
    hsdp_train::program(NAME, || {
        Ok(match command_line::read()? {
            Proof::Gpt(options) => gpt::run(&options)?,
            Proof::Contrastive(options) => contrastive::run(&options)?,
            Proof::Cost(options) => cost::run(&options)?,
        })
    })
}
