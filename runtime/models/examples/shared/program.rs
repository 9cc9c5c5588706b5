//! A program that trains, from its options to its exit code.

use std::process::ExitCode;

use hsdp::WorldOptions;
use hsdp_program::Warnings;

use super::environment;
use super::failure::Failure;
use super::options::RunOptions;
use super::ranks::Ranks;
use super::trace::Recorder;

/// Joins the ranks, runs `train` in this process, and prints its failure.
///
/// # Errors
/// The failure to begin, which is not printed yet.
pub(crate) fn run(
    name: &'static str,
    (options, world): (&RunOptions, WorldOptions),
    train: impl FnOnce(&Ranks, (&Recorder, &Warnings)) -> Result<(), Failure>,
) -> Result<ExitCode, Failure> {
    environment::set(options.mesh.world_size()).map_err(Failure::training)?;
    let warnings = Warnings::of(name);
    let recorder = Recorder::listen(&warnings)?;
    let ranks = Ranks::of(options, world)?;
    if let Some(rank) = ranks.of_process() {
        warnings.set_rank(rank);
    }
    let trained = ranks.check().and_then(|()| train(&ranks, (&recorder, &warnings)));
    // The failure is printed before the ranks end: a launcher kills the others as soon as one process is gone.
    Ok(trained.map_or_else(|failure| failure.tell(name), |()| ExitCode::SUCCESS))
}
