//! `hsdp checkpoint`: lists, checks, copies and compares checkpoints.

mod diff;
mod ls;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Subcommand};
use hsdp_checkpoint::{
    Disk, Exported, Generation, Head, Manifest, Slice, Store, Weights, Writer, export,
};
use hsdp_sharding::balanced;
use hsdp_train::print;
use hsdp_train::stderr::in_one_line;

use crate::CommandOutcome;

/// Subcommands of `hsdp checkpoint`.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// Lists the checkpoints of a directory: steps, meshes and sizes, and which are broken
    Ls(ls::LsArgs),
    /// Reads whole checkpoints, and compares all hashes
    Verify(VerifyArgs),
    /// Writes the parameters and buffers of a checkpoint in the layout of Hugging Face: safetensors
    /// files with an index
    Export(ExportArgs),
    /// Copies a checkpoint into another number of files
    Reshard(ReshardArgs),
    /// Compares two checkpoints, tensor by tensor and bit by bit
    Diff(diff::DiffArgs),
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

impl CheckpointCommand {
    pub(crate) fn run(self) -> Result<CommandOutcome, Box<dyn Error>> {
        match self {
            Self::Ls(options) => ls::run(&options),
            Self::Verify(options) => verify(&options),
            Self::Export(options) => export_weights(&options),
            Self::Reshard(options) => reshard(&options),
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

/// Options of `hsdp checkpoint verify`.
#[derive(Args, Debug)]
pub(crate) struct VerifyArgs {
    /// Directory of the checkpoints
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// Step of the checkpoint; without it, all checkpoints
    #[arg(long, value_name = "STEP")]
    step: Option<u64>,
}

/// Prints a line for each intact checkpoint, for each error, and for each checkpoint that a running
/// job has removed meanwhile, which is no damage.
pub(crate) fn verify(options: &VerifyArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let store = store(&options.directory);
    let steps = options.step.map_or_else(|| store.steps(), |step| Ok(vec![step]))?;
    if steps.is_empty() {
        return Err(format!("there is no checkpoint in {}", options.directory.display()).into());
    }
    let mut outcome = CommandOutcome::Well;
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
            outcome = CommandOutcome::Wrong;
            print(in_one_line(format_args!("step {step}: {error}")))?;
        }
    }
    Ok(outcome)
}

/// Options of `hsdp checkpoint export`.
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    which: Which,

    /// Folder to write, which must not exist
    #[arg(value_name = "OUT")]
    out: PathBuf,

    /// Maximum megabytes of tensors in a file
    #[arg(long, value_name = "MB", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..))]
    file_size: u64,

    /// Write the moving averages (`Ema`) of trained parameters and of buffers in place of these
    #[arg(long)]
    average: bool,
}

pub(crate) fn export_weights(options: &ExportArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let most = options.file_size.saturating_mul(1_000_000);
    let weights = if options.average { Weights::Average } else { Weights::Trained };
    let (step, exported) = options.which.read(|generation| {
        let exported = export(generation, &Disk, &options.out, weights, most)?;
        Ok((generation.manifest().step, exported))
    })?;
    let Exported { files, tensors, bytes } = exported;
    let out = options.out.display();
    print(in_one_line(format_args!(
        "step {step}: {tensors} tensors of {bytes} bytes in {files} files, in {out}"
    )))?;
    Ok(CommandOutcome::Well)
}

/// Options of `hsdp checkpoint reshard`.
#[derive(Args, Debug)]
pub(crate) struct ReshardArgs {
    #[command(flatten)]
    which: Which,

    /// Directory of checkpoints in which to write the copy
    #[arg(value_name = "OUT")]
    out: PathBuf,

    /// Number of files of the copy
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    files: u16,
}

/// Writes the copy, one file after the other. The content of one file at a time is in memory.
pub(crate) fn reshard(options: &ReshardArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    options.which.read(|generation| copy(generation, options))
}

fn copy(generation: &Generation, options: &ReshardArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let manifest = generation.manifest();
    let count = usize::from(options.files);
    let mut lease = store(&options.out).lease("hsdp checkpoint reshard")?;
    let draft = lease.begin(manifest.step)?;
    for index in 0..count {
        if let Err(error) = write_part(generation, draft.place(), Writer { index, of: count }) {
            draft.discard();
            return Err(error);
        }
    }
    let committed = draft.commit(head(manifest), count)?;
    let path = in_one_line(committed.path.display());
    print(format_args!("step {}: {count} files, in {path}", manifest.step))?;
    Ok(CommandOutcome::Well)
}

/// Writes this writer's part of each tensor.
fn write_part(
    generation: &Generation,
    place: &hsdp_checkpoint::DraftPlace,
    writer: Writer,
) -> Result<(), Box<dyn Error>> {
    let mut parts = Vec::new();
    for (name, tensor) in &generation.manifest().tensors {
        let numel = tensor.numel().ok_or("a tensor's number of elements does not fit 64 bits")?;
        let part = balanced(usize::try_from(numel)?, writer.of, writer.index);
        if !part.is_empty() {
            let begin = part.start as u64;
            let mut values = vec![0.0; part.len()];
            generation.read(name, begin, &mut values)?;
            parts.push((name, &tensor.shape, begin, values));
        }
    }
    let slices = parts.iter().map(|(tensor, shape, offset, values)| Slice {
        tensor,
        shape,
        offset: *offset,
        values: values[..].into(),
    });
    Ok(place.write(writer, &slices.collect::<Vec<_>>())?)
}

fn head(manifest: &Manifest) -> Head {
    let Manifest {
        step, mesh, training, optimizer, user, frozen_digest, settings, buffers, ..
    } = manifest.clone();
    Head { step, mesh, training, optimizer, user, frozen_digest, settings, buffers }
}
