//! Worlds of threads with a short deadline, and the results of their ranks.

use std::fmt::Debug;
use std::time::Duration;

use hsdp::{Error, Mesh, RankFailure, World, WorldOptions};

/// How long a rank of a test waits for one operation. Nothing here takes a tenth of it.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Runs `run` on every rank of a world of `size` threads and returns their results, in rank order.
///
/// # Panics
/// If a rank fails: with the errors of all ranks that did.
pub fn on_ranks<T: Send>(size: usize, run: impl Fn(World) -> Result<T, Error> + Sync) -> Vec<T> {
    let outcomes = outcomes(size, run);
    let failures: Vec<String> = outcomes
        .iter()
        .enumerate()
        .filter_map(|(rank, outcome)| Some(format!("rank {rank}: {}", outcome.as_ref().err()?)))
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    outcomes.into_iter().filter_map(Result::ok).collect()
}

/// Runs `run` on every rank and gives how each ended, in rank order.
///
/// # Panics
/// If a rank panics.
pub fn outcomes<T: Send>(
    size: usize,
    run: impl Fn(World) -> Result<T, Error> + Sync,
) -> Vec<Result<T, Error>> {
    let options = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    launched(size, options, run).into_iter().map(|rank| rank.expect("no rank panics")).collect()
}

/// Runs `run` on every rank of a world with these options, and returns how each ended, in rank
/// order. An error of `run` is a result like any other: it does not end the world.
pub fn launched<T: Send>(
    size: usize,
    options: WorldOptions,
    run: impl Fn(World) -> T + Sync,
) -> Vec<Result<T, RankFailure>> {
    hsdp::launch(size, options, |world| Ok(run(world)))
}

/// Runs `run`, which does not fail, on every rank of a world with the default options, and returns
/// the results in rank order.
///
/// # Panics
/// If a rank panics.
pub fn results<T: Send>(size: usize, run: impl Fn(World) -> T + Sync) -> Vec<T> {
    let launched = launched(size, WorldOptions::default(), run);
    launched.into_iter().map(|rank| rank.expect("no rank panics")).collect()
}

/// The error with which every rank ended.
///
/// # Panics
/// If a rank succeeded, or ranks got different errors.
pub fn common_error<T: Debug>(outcomes: Vec<Result<T, Error>>) -> Error {
    let errors = outcomes.into_iter().map(|outcome| outcome.expect_err("every rank fails"));
    let errors: Vec<Error> = errors.collect();
    let messages = errors.iter().map(ToString::to_string).collect();
    let _ = common(messages);
    errors.into_iter().next().expect("a world has a rank")
}

/// The value that all ranks hold.
///
/// # Panics
/// If a rank holds something else than rank 0.
pub fn common<T: PartialEq + Debug>(values: Vec<T>) -> T {
    let mut values = values.into_iter();
    let first = values.next().expect("a world has a rank");
    for (index, other) in values.enumerate() {
        assert_eq!(other, first, "rank {} differs from rank 0", index + 1);
    }
    first
}

/// Returns meshes of `replicate` x `shard` ranks.
///
/// # Panics
/// If there is no such mesh.
#[must_use]
pub fn meshes<const COUNT: usize>(sizes: [(usize, usize); COUNT]) -> [Mesh; COUNT] {
    sizes.map(|(replicate, shard)| mesh(replicate, shard))
}

/// Returns a mesh of `replicate` x `shard` ranks.
///
/// # Panics
/// If there is no such mesh.
#[must_use]
pub fn mesh(replicate: usize, shard: usize) -> Mesh {
    Mesh::new(replicate, shard).expect("a mesh")
}
