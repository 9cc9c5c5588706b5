//! `hsdp checkpoint`: lists, checks, copies and compares checkpoints.

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

/// Subcommands of `hsdp checkpoint`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Lists the checkpoints of a directory: steps, meshes and sizes, and which are broken
    Ls(ls::Options),
    /// Reads whole checkpoints, and compares all hashes
    Verify(verify::Options),
    /// Writes the parameters of a checkpoint in the layout of Hugging Face: safetensors files with
    /// an index
    Export(export::Options),
    /// Copies a checkpoint into another number of files
    Reshard(reshard::Options),
    /// Compares two checkpoints, tensor by tensor and bit by bit
    Diff(diff::Options),
}

/// Options that name a checkpoint.
#[derive(Args, Debug)]
pub(crate) struct Which {
    /// Directory of the checkpoints
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// Step of the checkpoint; without it, the newest intact one
    #[arg(long, value_name = "STEP")]
    step: Option<u64>,
}

/// Format of the output.
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

/// Opens the checkpoint of a step, or the newest intact one.
fn open(directory: &Path, step: Option<u64>) -> Result<Generation, Box<dyn Error>> {
    let store = store(directory);
    match step {
        Some(step) => Ok(store.open(step)?),
        None => store
            .latest()?
            .ok_or_else(|| format!("there is no checkpoint in {}", directory.display()).into()),
    }
}

/// Maximum number of times that a command starts with the newest checkpoint. It starts again if a
/// running job has removed the checkpoint that it read.
const MOST_TRIES: usize = 5;

impl Which {
    /// Opens the checkpoint, and calls `act` with it. If a running job removes the newest
    /// checkpoint meanwhile, starts again with its successor.
    fn read<T>(
        &self,
        mut act: impl FnMut(&Generation) -> Result<T, Box<dyn Error>>,
    ) -> Result<T, Box<dyn Error>> {
        let mut tries = 1;
        loop {
            match open(&self.directory, self.step).and_then(|generation| act(&generation)) {
                Err(error) if self.step.is_none() && is_absence(&*error) && tries < MOST_TRIES => {
                    tries += 1;
                }
                ended => return ended,
            }
        }
    }
}

/// Returns whether an error means that a checkpoint was removed while it was read.
fn is_absence(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref().is_some_and(hsdp_checkpoint::Error::is_absence)
}
