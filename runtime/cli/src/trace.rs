//! `hsdp trace`: explains the flight records of a world.

mod json;
pub(crate) mod records;

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use hsdp_comm::explain;
use hsdp_program::print;

use crate::outcome::Outcome;

/// The options of `hsdp trace`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Flight records (rank-N.json, each of at most 64 MiB, together of at most 1 GiB) of one world, or folders with them
    #[arg(value_name = "DUMP", required = true)]
    dumps: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Reads and explains the records.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let explanation = explain(&records::read(&options.dumps)?);
    match options.json {
        true => print(json::of(&explanation))?,
        false => print(explanation)?,
    }
    Ok(Outcome::Well)
}
