//! The launch of this process's ranks, and the failure that is reported if some of them fail.

use hsdp::{World, memory};

use super::failure::Failure;
use super::ranks::Ranks;

/// Runs the ranks of this process.
///
/// # Errors
/// The original failure if ranks fail, not one that only echoes it, with an explanation from the ranks' last operations.
pub(crate) fn launch<T: Send>(
    ranks: &Ranks,
    rank: impl Fn(World) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    memory::reset_peaks();
    let outcomes = ranks.launch(|world| {
        let flight = world.clone();
        let outcome = rank(world);
        // The record has the operations before the failure, which explain more than the error alone.
        let record = outcome.is_err().then(|| flight.flight_record());
        (outcome, record)
    })?;
    let mut records = Vec::new();
    let outcomes = outcomes.into_iter().map(|outcome| {
        let (outcome, record) = outcome.map_err(Failure::training)?;
        records.extend(record);
        outcome
    });
    let all = all_or_first(outcomes.collect());
    all.map_err(|failure| failure.explained(&records))
}

fn all_or_first<T>(outcomes: Vec<Result<T, Failure>>) -> Result<Vec<T>, Failure> {
    let (done, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    let mut failures = failed.into_iter().filter_map(Result::err).collect::<Vec<_>>();
    failures.sort_by_key(|failure| matches!(failure, Failure::Peer(_)));
    match failures.into_iter().next() {
        Some(first) => Err(first),
        None => Ok(done.into_iter().flatten().collect()),
    }
}
