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

use clap::Parser as _;

use crate::options::{Options, Subject};

#[expect(clippy::print_stderr, reason = "a command-line program")]
fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options.scaled(),
        Err(error) if !error.use_stderr() => {
            drop(error.print());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{}", error.to_string().lines().next().unwrap_or_default());
            return ExitCode::from(2);
        }
    };
    match measure(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
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
