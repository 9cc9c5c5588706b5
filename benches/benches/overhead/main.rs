//! The time of the runtime itself, without bytes to move or a model to compute.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench overhead
//! ```
//!
//! There are three subjects: the time of a unit of one element in a microbatch (two unshards and a
//! reduction), and its parts; the ratio of a step's time on 256 ranks to that on 64 ranks, where
//! each rank moves as many bytes; and the time to plan 10,000 units for 1,024 ranks.
//! docs/performance.md has the goals.
//!
//! In reading order: `options`, `units`, `ranks`, `plan`.

mod options;
mod plan;
mod ranks;
mod units;

use std::process::ExitCode;

use hsdp_benches::program;
use hsdp_train::Failure;

use crate::options::{Options, Subject};

fn main() -> ExitCode {
    program::run(|options: Options| measure(&options.scaled()))
}

fn measure(options: &Options) -> Result<(), Failure> {
    if options.measures(Subject::Units) {
        units::measure(options)?;
    }
    if options.measures(Subject::Ranks) {
        ranks::measure(options)?;
    }
    if options.measures(Subject::Plan) {
        plan::measure(options)?;
    }
    Ok(())
}
