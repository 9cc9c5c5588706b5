//! Work of all ranks between steps. A rank that fails in it has no step to drop: it tells the other ranks here. PROTOCOL.md,
//! "Failures between steps".

use std::fmt::Display;

use hsdp_comm::{StepFailure, World};

/// Runs a part of the work. If it fails, the other ranks get its error, unless they have one already, and this rank leaves the
/// epoch, unless it has left that for the same error of a rank that was ahead. Never waits for
/// another rank.
pub(crate) fn run<T, E: Display>(
    world: &World,
    step: u64,
    part: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let epoch = world.epoch();
    part().inspect_err(|error| {
        world.announce_mistake(epoch, StepFailure { step, reason: error.to_string() });
        world.next_epoch();
    })
}
