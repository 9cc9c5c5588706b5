//! `hsdp trace`: explains the flight records of a world.

mod json;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use hsdp_comm::{FlightRecord, explain};

use crate::outcome::{Outcome, print};

/// The options of `hsdp trace`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Flight records (rank-N.json) of one world, or folders with them
    #[arg(value_name = "DUMP", required = true)]
    dumps: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Reads and explains the records.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let mut records = Vec::new();
    for dump in &options.dumps {
        for file in files(dump)? {
            records.push(read(&file)?);
        }
    }
    let explanation = explain(&records);
    match options.json {
        true => print(&json::of(&explanation).to_string())?,
        false => print(&explanation.to_string())?,
    }
    Ok(Outcome::Well)
}

/// The file itself, or the records of a folder, in order of rank.
fn files(dump: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", dump.display());
    if !fs::metadata(dump).map_err(failed)?.is_dir() {
        return Ok(vec![dump.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(dump).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if let Some(rank) = rank(&path) {
            files.push((rank, path));
        }
    }
    files.sort();
    match files.is_empty() {
        true => Err(format!("{}: there is no rank-N.json in this folder", dump.display())),
        false => Ok(files.into_iter().map(|(_, path)| path).collect()),
    }
}

/// The rank in a name such as `rank-12.json`.
fn rank(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix("rank-")?.strip_suffix(".json")?.parse().ok()
}

fn read(file: &Path) -> Result<FlightRecord, String> {
    FlightRecord::read_from(file).map_err(|error| {
        let said = error.to_string();
        // An error of the system names the file already.
        let named = format!("{}: ", file.display());
        if said.starts_with(&named) { said } else { format!("{named}{said}") }
    })
}
