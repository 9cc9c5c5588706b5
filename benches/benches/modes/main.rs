//! What the deferred all-reduce saves: a step that reduces over both axes in every microbatch, one that reduce-scatters in
//! every microbatch and all-reduces once, and one that does both once.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench modes -- --plot "$PWD/docs/modes.svg"
//! ```
//!
//! Gradients are there already, so a step is what it moves. It is measured twice: with collectives as fast as this machine's
//! memory, and with links that take a latency and the time of their bytes, as on a network. That time is injected; nothing is
//! sent anywhere. Beside the times stand what the plan says that a rank receives and holds.
//!
//! In reading order: `options`, `measure`, `table`, `plot`.

mod measure;
mod options;
mod plot;
mod table;

use std::process::ExitCode;

use hsdp_benches::program;

use crate::options::Options;

fn main() -> ExitCode {
    program::run(|options: Options| run(&options.scaled()))
}

fn run(options: &Options) -> Result<(), String> {
    let rows = measure::rows(options)?;
    table::print(options, &rows);
    match &options.plot {
        None => Ok(()),
        Some(file) => plot::draw(file, options, &rows)
            .map_err(|error| format!("cannot draw {}: {error}", file.display())),
    }
}
