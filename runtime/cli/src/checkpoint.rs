//! `hsdp checkpoint`: what to do with which checkpoint.

mod diff;
mod export;
mod ls;
mod reshard;
mod verify;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Subcommand, ValueEnum};
use hsdp_checkpoint::{Disk, Generation, Store};

use crate::outcome::Outcome;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Lists the checkpoints of a directory: steps, meshes, sizes; and which are broken
    Ls(ls::Options),
    /// Reads checkpoints from their beginning to their end, and compares all hashes
    Verify(verify::Options),
    /// Writes the parameters of a checkpoint as a folder of safetensors files with an index, as Hugging Face has them
    Export(export::Options),
    /// Writes a checkpoint anew, in another number of files
    Reshard(reshard::Options),
    /// Compares two checkpoints, tensor by tensor and bit by bit
    Diff(diff::Options),
}

/// Which checkpoint is meant.
#[derive(Args, Debug)]
pub(crate) struct Which {
    /// The directory of the checkpoints
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// The step; without it, the newest that is intact
    #[arg(long, value_name = "STEP")]
    step: Option<u64>,
}

/// How to say it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Text,
    /// For scripts.
    Json,
}

impl Command {
    pub(crate) fn run(self) -> Result<Outcome, Box<dyn Error>> {
        match self {
            Self::Ls(options) => ls::run(&options),
            Self::Verify(options) => verify::run(&options),
            Self::Export(options) => export::run(&options),
            Self::Reshard(options) => reshard::run(&options),
            Self::Diff(options) => diff::run(&options),
        }
    }
}

fn store(directory: &Path) -> Store {
    Store::new(directory, Arc::new(Disk))
}

/// Opens it.
fn open(directory: &Path, step: Option<u64>) -> Result<Generation, Box<dyn Error>> {
    let store = store(directory);
    match step {
        Some(step) => Ok(store.open(step)?),
        None => store
            .latest()?
            .ok_or_else(|| format!("there is no checkpoint in {}", directory.display()).into()),
    }
}

impl Which {
    fn open(&self) -> Result<Generation, Box<dyn Error>> {
        open(&self.directory, self.step)
    }
}
