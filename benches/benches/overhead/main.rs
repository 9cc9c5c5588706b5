//! What the runtime itself takes, without bytes to move or a model to compute.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench overhead
//! ```
//!
//! Three subjects: what a unit of one element costs in a microbatch (two unshards and a reduction), and where; how much
//! longer a step takes on 256 ranks than on 64 when each rank moves as much; and how long it takes to plan 10,000 units
//! for 1,024 ranks. docs/performance.md says what is to be expected.
//!
//! In reading order: `options`, `units`, `ranks`, `plan`.

mod options;
mod plan;
mod ranks;
mod units;

use std::process::ExitCode;

use hsdp_benches::program;

use crate::options::{Options, Subject};

fn main() -> ExitCode {
    program::run(|options: Options| measure(&options.scaled()))
}

fn measure(options: &Options) -> Result<(), String> {
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
