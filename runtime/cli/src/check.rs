//! `hsdp check`: judges whether all operations of schedules complete, without running them.

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::Args;
use hsdp_simulator::{ScheduleVerdict, Schedules, judge};
use hsdp_train::stderr::in_one_line;
use hsdp_train::{file, print};

use crate::CommandOutcome;
use crate::trace::{rank_of, read_records};

/// Maximum number of bytes in a file.
const MAX_BYTES: u64 = 64 << 20;

/// Options of `hsdp check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// Schedules (CHECK.md; JSON of at most 64 MiB), or folders, each with the flight records
    /// (rank-N.json) of a world that was cut off
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

/// Prints the verdict of each file, in their order, until one cannot be read.
pub(crate) fn run(options: &CheckArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let mut outcome = CommandOutcome::Well;
    for file in &options.files {
        let verdict = judge(&read(file)?);
        if verdict != ScheduleVerdict::Ok {
            outcome = CommandOutcome::Wrong;
        }
        // Each file has one line, even if its name has a newline.
        print(in_one_line(format_args!("{}: {verdict}", file.display())))?;
    }
    Ok(outcome)
}

fn read(path: &Path) -> Result<Schedules, String> {
    let said = |error: hsdp_simulator::Error| format!("{}: {error}", path.display());
    if path.is_dir() {
        let records = read_records(&[path.to_owned()])?;
        return Schedules::from_records(&records).map_err(said);
    }
    let text = file::read_text(path, MAX_BYTES).map_err(|error| error.to_string())?;
    let advice = match rank_of(path) {
        Some(_) => "; flight records are checked together, by the name of their folder",
        None => "",
    };
    Schedules::from_json(&text).map_err(|error| said(error) + advice)
}
