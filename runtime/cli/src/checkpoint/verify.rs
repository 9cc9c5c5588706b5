//! `hsdp checkpoint verify`.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use hsdp_train::print;
use hsdp_train::stderr::in_one_line;

use super::store;
use crate::outcome::Outcome;

/// Options of `hsdp checkpoint verify`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Directory of the checkpoints
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// Step of the checkpoint; without it, all checkpoints
    #[arg(long, value_name = "STEP")]
    step: Option<u64>,
}

/// Prints a line for each intact checkpoint, for each error, and for each checkpoint that a running
/// job has removed meanwhile, which is no damage.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let store = store(&options.directory);
    let steps = options.step.map_or_else(|| store.steps(), |step| Ok(vec![step]))?;
    if steps.is_empty() {
        return Err(format!("there is no checkpoint in {}", options.directory.display()).into());
    }
    let mut outcome = Outcome::Well;
    for step in steps {
        let wrong = match store.open(step) {
            Ok(generation) => generation.verify(),
            Err(error) => vec![error],
        };
        if wrong.iter().any(hsdp_checkpoint::Error::is_absence) {
            match (options.step, wrong.into_iter().next()) {
                (Some(_), Some(absence)) => return Err(absence.into()),
                _ => print(format_args!("step {step}: removed meanwhile"))?,
            }
            continue;
        }
        if wrong.is_empty() {
            print(format_args!("step {step}: intact"))?;
        }
        for error in wrong {
            outcome = Outcome::Wrong;
            print(in_one_line(format_args!("step {step}: {error}")))?;
        }
    }
    Ok(outcome)
}
