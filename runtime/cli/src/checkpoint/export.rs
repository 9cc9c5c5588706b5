//! `hsdp checkpoint export`.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use hsdp_checkpoint::{Disk, Exported, Weights, export};
use hsdp_train::print;
use hsdp_train::stderr::in_one_line;

use super::Which;
use crate::outcome::Outcome;

/// Options of `hsdp checkpoint export`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    which: Which,

    /// Folder to write, which must not exist
    #[arg(value_name = "OUT")]
    out: PathBuf,

    /// Maximum megabytes of tensors in a file
    #[arg(long, value_name = "MB", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..))]
    file_size: u64,

    /// Write the moving averages of trained parameters (`Ema`) in place of the parameters
    #[arg(long)]
    average: bool,
}

pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let most = options.file_size.saturating_mul(1_000_000);
    let weights = if options.average { Weights::Average } else { Weights::Trained };
    let (step, exported) = options.which.read(|generation| {
        let exported = export(generation, &Disk, &options.out, weights, most)?;
        Ok((generation.manifest().step, exported))
    })?;
    let (Exported { files, tensors, bytes }, out) = (exported, options.out.display());
    print(in_one_line(format_args!(
        "step {step}: {tensors} tensors of {bytes} bytes in {files} files, in {out}"
    )))?;
    Ok(Outcome::Well)
}
