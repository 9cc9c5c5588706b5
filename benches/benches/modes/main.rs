//! The time that the deferred all-reduce saves: a step that reduces over both axes in every
//! microbatch, a step that reduce-scatters in every microbatch and all-reduces once, and a step
//! that does both once. A fourth step is as the second one, and its replicas divide optimizer
//! state. Each step ends with an update by SGD.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench modes -- --plot "$PWD/docs/modes.svg"
//! ```
//!
//! Gradients exist already, so the time of a step is that of its data movement. It is measured
//! twice: with collectives as fast as this machine's memory, and with links that take a latency and
//! the time of their bytes, as on a network. That time is injected; no network is used. The table
//! also has the bytes that a rank receives and holds, according to the plan.
//!
//! With `--predict` the simulator predicts the steps over slow links (docs/simulator.md).
//!
//! In reading order: `options`, `measure`, `table`, `plot`, `predict`.

mod measure;
mod options;
mod plot;
mod predict;
mod table;

use std::process::ExitCode;

use hsdp_benches::plot::Plot;
use hsdp_benches::program;
use hsdp_train::Failure;

use crate::options::Options;

fn main() -> ExitCode {
    program::run(|options: Options| run(&options.scaled()))
}

fn run(options: &Options) -> Result<(), Failure> {
    options.check()?;
    let plot = Plot::check(options.plot.as_deref())?;
    let rows = measure::rows(options).map_err(Failure::Work)?;
    table::show(options, &rows)?;
    if options.predict {
        predict::show(options, &rows)?;
    }
    plot.write(|| plot::draw(options, &rows))
}
