//! The launch of this process's ranks, and the failure that is reported if some of them fail.

use hsdp::{World, memory};

use super::costs::Costs;
use super::ending::Ended;
use super::failure::Failure;
use super::ranks::Ranks;

/// The results of one rank.
#[derive(Debug)]
pub(crate) struct Outcome<F> {
    pub(crate) costs: Costs,
    pub(crate) ended: Ended,
    /// Those that only rank 0 has.
    pub(crate) first: Option<F>,
}

/// The results of this process's ranks.
#[derive(Debug)]
pub(crate) struct Outcomes<F> {
    /// By rank.
    pub(crate) costs: Vec<Costs>,
    pub(crate) ended: Ended,
    /// Those of rank 0, if it is one of them.
    pub(crate) first: Option<F>,
}

/// Runs the ranks of this process.
///
/// # Errors
/// As [`each`].
pub(crate) fn launch<F: Send>(
    ranks: &Ranks,
    rank: impl Fn(World) -> Result<Outcome<F>, Failure> + Sync,
) -> Result<Outcomes<F>, Failure> {
    let (mut costs, mut first) = (Vec::new(), None);
    let mut ended = Ended::default();
    for outcome in each(ranks, rank)? {
        costs.push(outcome.costs);
        // All ranks end alike.
        ended = outcome.ended;
        first = first.or(outcome.first);
    }
    Ok(Outcomes { costs, ended, first })
}

/// The result of each rank of this process.
///
/// # Errors
/// The original failure if ranks fail, not one that only echoes it, with an explanation from the ranks' last operations.
fn each<T: Send>(
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
