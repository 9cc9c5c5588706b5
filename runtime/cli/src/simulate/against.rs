//! Compares predictions with measured steps.

use std::error::Error;
use std::path::Path;

use hsdp_simulator::{Errors, Machine, Placing, read_steps};
use hsdp_train::print;

use crate::calibrate;
use crate::outcome::Outcome;

/// Prints the prediction for each row of a table of measured steps, and the errors of all.
pub(super) fn run(table: &Path, machine: &Machine) -> Result<Outcome, Box<dyn Error>> {
    let rows = calibrate::read(table, read_steps)?;
    let mut placing = Placing::new(machine);
    let (mut text, mut pairs) = (String::new(), Vec::new());
    for (row, measured) in &rows {
        let predicted = row.workload().and_then(|step| placing.place(&step)?.time(machine));
        let predicted =
            predicted.map_err(|error| format!("{}: {row}: {error}", table.display()))?;
        let error = 100.0 * Errors::of([(predicted, *measured)]).relative[0];
        text += &format!("{row}: measured {measured}, predicted {predicted} ({error:+.2} %)\n");
        pairs.push((predicted, *measured));
    }
    let errors = Errors::of(pairs);
    let (mean, worst) = (100.0 * errors.mean(), 100.0 * errors.worst());
    text += &format!("{} steps, mean error {mean:.2} %, worst {worst:.2} %", rows.len());
    print(text)?;
    Ok(Outcome::Well)
}
