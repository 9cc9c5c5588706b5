//! Predicted steps beside measured ones (docs/simulator.md): machines are fitted to a part of the
//! measurements, and predict the rest.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench predictions -- --plot "$PWD/docs/simulator.svg"
//! ```
//!
//! The tables are in runtime/simulator/tests: published steps of GPTs on a node of A100, of which
//! every third is left out, and steps of the example's GPT on two cores, as `benches/cpu_steps.sh`
//! measures them.

mod plot;
mod tables;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use hsdp_benches::plot::Plot;
use hsdp_benches::program;
use hsdp_simulator::Errors;
use hsdp_train::{Failure, print};

use crate::tables::{Held, cores, node};

/// Predicts the steps that no machine is fitted to.
#[derive(Clone, Debug, Parser)]
#[command(name = "predictions")]
struct Options {
    /// The file into which predicted and measured times are drawn, as SVG.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// An option that `cargo bench` passes to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    program::run(|options: Options| run(&options))
}

fn run(options: &Options) -> Result<(), Failure> {
    let plot = Plot::check(options.plot.as_deref())?;
    let held = [node().map_err(Failure::work)?, cores().map_err(Failure::work)?];
    held.iter().try_for_each(show)?;
    plot.write(|| plot::draw(&held))?;
    held.iter().try_for_each(check)
}

/// Fails if the errors are larger than they were.
fn check(held: &Held) -> Result<(), Failure> {
    let errors = held.errors();
    let found = [errors.mean(), errors.worst()];
    let most = held.most;
    match found[0] < most[0] && found[1] < most[1] {
        true => Ok(()),
        false => Err(Failure::Work(format!(
            "{}: errors of {found:?}, mean and worst, are beyond {most:?}",
            held.name
        ))),
    }
}

fn show(held: &Held) -> Result<(), Failure> {
    let Held { name, fitted_to, numbers, steps, .. } = held;
    print(format_args!("{name}, fitted to {fitted_to} other steps:\n"))?;
    numbers
        .iter()
        .try_for_each(|number| print(format_args!("    {} = {number}", number.number.name)))?;
    print("\n| step | measured | predicted | error |\n|---|---|---|---|")?;
    for (step, times) in steps {
        let error = 100.0 * Errors::of([*times]).relative[0];
        let (predicted, measured) = times;
        print(format_args!("| {step} | {measured} | {predicted} | {error:+.1} % |"))?;
    }
    let errors = held.errors();
    let [mean, worst] = [errors.mean(), errors.worst()].map(|error| 100.0 * error);
    print(format_args!("\n{} steps, mean error {mean:.2} %, worst {worst:.2} %\n", steps.len()))?;
    Ok(())
}
