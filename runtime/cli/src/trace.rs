//! `hsdp trace`: explains the flight records of a world.

mod json;
pub(crate) mod records;

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use hsdp_comm::explain;
use hsdp_train::stderr::in_one_line;
use hsdp_train::{print, print_json};

use crate::outcome::Outcome;

/// Options of `hsdp trace`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Flight records (rank-N.json, each of at most 64 MiB, together of at most 1 GiB) of one
    /// world, or folders with them
    #[arg(value_name = "DUMP", required = true)]
    dumps: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Reads and explains the records.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let mut explanation = explain(&records::read(&options.dumps)?);
    match options.json {
        true => print_json(&json::of(&explanation))?,
        false => {
            // Each end has one line, even if a record has a newline.
            explanation.ends.iter_mut().for_each(|end| end.text = in_one_line(&end.text));
            print(explanation)?;
        }
    }
    Ok(Outcome::Well)
}
