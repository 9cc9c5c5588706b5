//! `hsdp calibrate`: numbers of a machine, fitted to measurements.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use hsdp_program::{file, print};
use hsdp_simulator::{
    AllReduceRow, Fit, Machine, StepRow, Time, fit, read_all_reduces, read_steps,
};

use crate::machine;
use crate::outcome::Outcome;

/// The most bytes of a table.
const MAX_BYTES: u64 = 16 << 20;

/// The numbers that all-reduces tell.
const OF_ALL_REDUCES: [&str; 2] = ["calls.start", "links.machine.efficiency"];

/// The numbers that steps tell: of cards, whose kernels the host launches, and of cores.
const OF_STEPS_ON_CARDS: [&str; 6] = [
    "compute.efficiency",
    "compute.unaligned",
    "compute.half",
    "compute.launch",
    "compute.kernel",
    "memory.efficiency",
];
const OF_STEPS_ON_CORES: [&str; 4] =
    ["compute.efficiency", "compute.half", "compute.launch", "memory.efficiency"];

/// The options of `hsdp calibrate`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Machine whose other numbers are known: a file (MACHINES.md), or a100-node, a100-cluster, h100-cluster or two-core-cpu
    #[arg(long, value_name = "MACHINE", default_value = "a100-node")]
    machine: String,

    /// Measured times of training steps, as CSV (SIMULATE.md), of at most 16 MiB
    #[arg(long, value_name = "CSV")]
    steps: PathBuf,

    /// Measured times of all-reduces within a machine with cards, as CSV (SIMULATE.md), of at most 16 MiB
    #[arg(long, value_name = "CSV")]
    all_reduce: Option<PathBuf>,

    /// Machine file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Fits the machine, prints the fitted numbers with the residuals, and writes the machine.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let mut machine = machine::find(&options.machine)?;
    let mut text = String::new();
    if let Some(path) = &options.all_reduce {
        let rows = read(path, read_all_reduces)?;
        let fitted = fit(&machine, &OF_ALL_REDUCES, &rows, |it, row| row.predict(it))?;
        text += &told("all-reduces", &fitted, &rows, AllReduceRow::to_string);
        machine = fitted.machine;
    }
    let rows = read(&options.steps, read_steps)?;
    let names: &[&str] = match machine.device() {
        Some(_) => &OF_STEPS_ON_CARDS,
        None => &OF_STEPS_ON_CORES,
    };
    let prepared = rows.iter().map(|(row, time)| Ok((row.workload()?, *time)));
    let prepared = prepared.collect::<Result<Vec<_>, hsdp_simulator::Error>>()?;
    let fitted = fit(&machine, names, &prepared, |it, row| Ok(row.predict(it)?.timing.step))?;
    text += &told("steps", &fitted, &rows, StepRow::to_string);
    write(&options.out, &fitted.machine)?;
    print(text.trim_end())?;
    Ok(Outcome::Well)
}

fn write(path: &Path, machine: &Machine) -> Result<(), String> {
    fs::write(path, machine.to_toml()).map_err(|error| format!("{}: {error}", path.display()))
}

/// Reads a table.
///
/// # Errors
/// In one line, with the file.
pub(crate) fn read<R>(
    path: &Path,
    rows: impl Fn(&str) -> Result<Vec<(R, Time)>, hsdp_simulator::Error>,
) -> Result<Vec<(R, Time)>, String> {
    let text = file::read_text(path, MAX_BYTES).map_err(|error| error.to_string())?;
    rows(&text).map_err(|error| format!("{}: {error}", path.display()))
}

/// The fitted numbers, and the residual of each row.
fn told<R>(what: &str, fitted: &Fit, rows: &[(R, Time)], row: impl Fn(&R) -> String) -> String {
    let mut text = String::new();
    for number in &fitted.numbers {
        text += &format!("{} = {}\n", number.name, number);
    }
    for ((of, time), relative) in rows.iter().zip(&fitted.errors.relative) {
        text += &format!("{}: measured {time}, predicted {:+.2} %\n", row(of), 100.0 * relative);
    }
    let (mean, worst) = (100.0 * fitted.errors.mean(), 100.0 * fitted.errors.worst());
    text + &format!("{} {what}, mean error {mean:.2} %, worst {worst:.2} %\n", rows.len())
}
