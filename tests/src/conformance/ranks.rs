//! Ranks as threads, for a case.

use std::fmt::Display;
use std::time::Duration;

use hsdp::{Mesh, World, WorldOptions, launch};
use hsdp_comm::RankFailure;

/// No operation of a case takes longer, on the slowest machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Runs `act` on every rank of `mesh` and gives what each of them made, in rank order.
///
/// # Errors
/// The first rank that failed or panicked, and how.
pub(super) fn on_ranks<T: Send, E: Display + Send>(
    mesh: Mesh,
    act: impl Fn(World) -> Result<T, E> + Sync,
) -> Result<Vec<T>, String> {
    let options = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    let ended = launch(mesh.world_size(), options, act);
    let result = |(rank, ended): (usize, Result<Result<T, E>, RankFailure>)| match ended {
        Ok(Ok(made)) => Ok(made),
        Ok(Err(error)) => Err(format!("rank {rank}: {error}")),
        Err(failure) => Err(failure.to_string()),
    };
    ended.into_iter().enumerate().map(result).collect()
}
