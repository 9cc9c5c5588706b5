//! Ranks as threads. Their results, errors among them, do not end their world.

#![allow(dead_code, reason = "every test crate uses its own part of this")]

use hsdp_comm::{RankFailure, World, WorldOptions, launch};

/// Runs `size` ranks, and returns their results in rank order, or the panic of a rank.
pub(crate) fn outcomes<T: Send>(
    size: usize,
    options: WorldOptions,
    rank: impl Fn(World) -> T + Sync,
) -> Vec<Result<T, RankFailure>> {
    launch(size, options, |world| Ok(rank(world)))
}

/// Runs `size` ranks with the default options, and returns their results in rank order. Panics if a
/// rank does.
pub(crate) fn results<T: Send>(size: usize, rank: impl Fn(World) -> T + Sync) -> Vec<T> {
    let outcomes = outcomes(size, WorldOptions::default(), rank);
    outcomes.into_iter().map(|outcome| outcome.expect("no rank panics")).collect()
}
