//! `hsdp calibrate`: fits numbers of a machine to measurements.

use std::error::Error;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::Args;
use hsdp_simulator::{
    AllReduceRow, Errors, Fit, Machine, Measurements, Placed, Placing, StepRow, Time, fit,
    read_all_reduces, read_steps,
};
use hsdp_train::file::Output;
use hsdp_train::stderr::in_one_line;
use hsdp_train::{file, print};

use crate::CommandOutcome;
use crate::model::find_machine;
use crate::output::cannot_write;

/// Maximum number of bytes in a table.
const MAX_BYTES: u64 = 16 << 20;

/// Options of `hsdp calibrate`.
#[derive(Args, Debug)]
pub(crate) struct CalibrateArgs {
    /// Machine whose other numbers are known: a file (MACHINES.md), or a100-node, a100-cluster,
    /// h100-cluster or two-core-cpu
    #[arg(long, value_name = "MACHINE", default_value = "a100-node")]
    machine: String,

    /// Measured times of training steps, as CSV (SIMULATE.md), of at most 16 MiB, 250,000 layers,
    /// and 500,000 units, each counted for each kind of ranks
    #[arg(long, value_name = "CSV")]
    steps: PathBuf,

    /// Measured times of all-reduces within a machine with cards, as CSV (SIMULATE.md), of at most
    /// 16 MiB
    #[arg(long, value_name = "CSV")]
    all_reduce: Option<PathBuf>,

    /// Machine file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Fits the machine, prints the errors of all rows and the fitted numbers, and writes the machine.
pub(crate) fn run(options: &CalibrateArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let machine_file = Path::new(&options.machine);
    let inputs = [machine_file, &options.steps].into_iter().chain(options.all_reduce.as_deref());
    let out = Output::check(&options.out, &inputs.collect::<Vec<_>>()).map_err(cannot_write)?;
    let mut machine = find_machine(&options.machine)?;
    let mut told = Told::default();
    if let Some(path) = &options.all_reduce {
        let rows = read(path, read_all_reduces)?;
        let of = AllReduceRow::NUMBERS;
        let predict = |machine: &Machine, row: &AllReduceRow| row.predict(machine);
        let fitted = fit_table(path, &rows, |it| fit(&machine, &of, it, predict))?;
        told.add("all-reduces", &rows, &fitted);
        machine = fitted.machine;
    }
    let rows = read(&options.steps, read_steps)?;
    let mut placing = Placing::new(&machine);
    let place = |(row, time): &(StepRow, Time)| match row
        .workload()
        .and_then(|step| placing.place(&step))
    {
        Ok(step) => Ok((step, *time)),
        Err(error) => Err(format!("{}: {row}: {error}", options.steps.display())),
    };
    let steps = rows.iter().map(place).collect::<Result<Vec<_>, _>>()?;
    placing.check_fit().map_err(|error| format!("{}: {error}", options.steps.display()))?;
    let of = StepRow::numbers(&machine);
    let predict = |machine: &Machine, step: &Placed| step.time(machine);
    let fitted = fit_table(&options.steps, &steps, |it| fit(&machine, of, it, predict))?;
    told.add("steps", &rows, &fitted);
    out.write_all(fitted.machine.to_toml()).map_err(cannot_write)?;
    let wrote = in_one_line(options.out.display());
    print(format_args!("{}{}\nwrote {wrote}", told.rows, told.numbers))?;
    Ok(CommandOutcome::Well)
}

/// Fits numbers to the rows of a file. Errors name the file.
fn fit_table<R>(
    path: &Path,
    rows: &[(R, Time)],
    fit: impl FnOnce(&Measurements<'_, R>) -> Result<Fit, hsdp_simulator::Error>,
) -> Result<Fit, String> {
    let table = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    fit(&Measurements { table: &table, rows })
        .map_err(|error| format!("{}: {error}", path.display()))
}

/// Reads a table.
///
/// # Errors
/// A text of one line, with the file.
fn read<R>(
    path: &Path,
    rows: impl Fn(&str) -> Result<Vec<(R, Time)>, hsdp_simulator::Error>,
) -> Result<Vec<(R, Time)>, String> {
    let text = file::read_text(path, MAX_BYTES).map_err(|error| error.to_string())?;
    rows(&text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Text of the fits: all rows, then all numbers.
#[derive(Default)]
struct Told {
    rows: String,
    numbers: String,
}

impl Told {
    fn add<R: Display>(&mut self, what: &str, rows: &[(R, Time)], fitted: &Fit) {
        for ((row, measured), predicted) in rows.iter().zip(&fitted.predicted) {
            self.rows += &compared(row, *measured, *predicted);
        }
        self.numbers +=
            &format!("\nfitted to {} {what}, {}:\n", rows.len(), summary(&fitted.errors));
        for fitted in &fitted.numbers {
            self.numbers += &format!("{} = {fitted}\n", fitted.number.name);
        }
    }
}

/// Prints the prediction for each row of a table of measured steps, and the errors of all.
pub(crate) fn against(table: &Path, machine: &Machine) -> Result<CommandOutcome, Box<dyn Error>> {
    let rows = read(table, read_steps)?;
    let mut placing = Placing::new(machine);
    let mut text = String::new();
    let mut pairs = Vec::new();
    for (row, measured) in &rows {
        let predicted = row.workload().and_then(|step| placing.place(&step)?.time(machine));
        let predicted =
            predicted.map_err(|error| format!("{}: {row}: {error}", table.display()))?;
        text += &compared(row, *measured, predicted);
        pairs.push((predicted, *measured));
    }
    text += &format!("{} steps, {}", rows.len(), summary(&Errors::of(pairs)));
    print(text)?;
    Ok(CommandOutcome::Well)
}

/// Returns the line of a row.
fn compared(row: &dyn Display, measured: Time, predicted: Time) -> String {
    let error = 100.0 * Errors::of([(predicted, measured)]).relative[0];
    format!("{row}: measured {measured}, predicted {predicted} ({error:+.2} %)\n")
}

fn summary(errors: &Errors) -> String {
    let mean = 100.0 * errors.mean();
    let worst = 100.0 * errors.worst();
    format!("mean error {mean:.2} %, worst {worst:.2} %")
}
