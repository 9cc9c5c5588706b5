//! Ranks that are threads of one process. Each takes memory and a share of the cores.

use hsdp::{FlightRecord, RankFailure, World, WorldOptions};
use parking_lot::Mutex;

use crate::failure::Failure;

/// Maximum number of ranks in the examples, which train.
pub const IN_EXAMPLES: usize = 64;

/// Checks that no more than `most` ranks run as threads of one process.
///
/// # Errors
/// A text that begins with the number of ranks.
pub fn check(ranks: usize, most: usize) -> Result<(), String> {
    match ranks <= most {
        true => Ok(()),
        false => Err(format!("{ranks} ranks: at most {most} run as threads of one process")),
    }
}

/// Runs each rank as a thread, and returns their results in the order of the ranks.
///
/// # Errors
/// The first failure, in the order of the ranks, that does not only follow from that of another
/// rank, with an explanation that is derived from the last operations of the ranks.
pub fn run<T: Send>(
    ranks: usize,
    options: WorldOptions,
    rank: impl Fn(World) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    let records = Records::default();
    let outcomes = hsdp::launch(ranks, options, |world| Ok(records.of(world, &rank)));
    records.results(outcomes).map_err(Failure::with_first_rank)
}

/// Last operations of the ranks that failed or panicked. They explain more than the errors.
#[derive(Debug, Default)]
pub(crate) struct Records(Mutex<Vec<FlightRecord>>);

impl Records {
    /// Runs one rank.
    pub(crate) fn of<T>(
        &self,
        world: World,
        rank: impl Fn(World) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut unless_done = AtEnd { records: self, world: Some(world.clone()) };
        let result = rank(world);
        if result.is_ok() {
            unless_done.world = None;
        }
        result
    }

    /// Returns the results of all ranks of this process, or the failure that caused the others.
    pub(crate) fn results<T>(
        self,
        outcomes: Vec<Result<Result<T, Failure>, RankFailure>>,
    ) -> Result<Vec<T>, Failure> {
        let mut done = Vec::new();
        let mut failures = Vec::new();
        for outcome in outcomes {
            match outcome {
                Ok(Ok(output)) => done.push(output),
                Ok(Err(failure)) => failures.push(failure.in_training()),
                Err(panicked) => failures.push(Failure::work(panicked).in_training()),
            }
        }
        failures.sort_by_key(|failure| match failure {
            Failure::Elsewhere => 2,
            Failure::Peer(_) => 1,
            _ => 0,
        });
        let records = self.0.into_inner();
        match failures.into_iter().next() {
            Some(first) => Err(first.explained(&records)),
            None => Ok(done),
        }
    }
}

/// Adds the record of a rank when the rank ends, also by a panic.
struct AtEnd<'a> {
    records: &'a Records,
    /// World of the rank. `None` if the rank is done, and needs no record.
    world: Option<World>,
}

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        if let Some(world) = &self.world {
            self.records.0.lock().push(world.flight_record());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hsdp::{Channel, Tag, WorldOptions};

    use super::{check, run};
    use crate::failure::Failure;

    #[test]
    fn the_original_failure_comes_before_those_that_follow_from_it() {
        let failed = run(3, WorldOptions::default(), |world| match world.rank().index() {
            2 => Err(Failure::work("no more batches")),
            _ => Ok(world.world_group(Channel::User).barrier(Tag::default())?.wait()?),
        });
        let failure = failed.expect_err("rank 2 failed");
        assert_eq!(failure.to_string(), "training failed: no more batches");
        assert!(matches!(failure, Failure::Explained(..)), "{failure:?}");
    }

    #[test]
    fn a_rank_that_panics_has_a_record() {
        let waiting = AtomicUsize::new(0);
        let failed = run(4, WorldOptions::default(), |world| {
            let barrier = || world.world_group(Channel::User).barrier(Tag::default());
            barrier()?.wait()?;
            if world.rank().index() == 2 {
                // A barrier that the others have not issued either would explain nothing.
                while waiting.load(Ordering::Acquire) < 3 {
                    std::thread::yield_now();
                }
                panic!("on purpose");
            }
            let pending = barrier()?;
            waiting.fetch_add(1, Ordering::Release);
            Ok(pending.wait()?)
        });
        let failure = failed.expect_err("rank 2 panicked");
        assert!(failure.to_string().contains("on purpose"), "{failure}");
        let Failure::Explained(_, explanation) = failure else { panic!("{failure:?}") };
        assert!(!explanation.contains("no record"), "{explanation}");
        let last = "rank 2 has not issued it: its last operation was barrier";
        assert!(explanation.contains(last), "{explanation}");
    }

    #[test]
    fn a_refusal_that_rank_0_does_not_report_is_no_success() {
        let lonely = |others: fn() -> Result<(), Failure>| {
            let failed = run(3, WorldOptions::default(), |world| match world.rank().index() {
                1 => Err(Failure::Elsewhere),
                _ => others(),
            });
            failed.expect_err("rank 1 refuses")
        };
        let alone = lonely(|| Ok(()));
        assert!(matches!(&alone, Failure::Work(what) if what.contains("rank 0")), "{alone:?}");
        assert_eq!(alone.exit_code(), ExitCode::FAILURE);
        let peer = lonely(|| Err(Failure::Peer("rank 1 has left".to_owned())));
        assert_eq!(peer.to_string(), "training failed: rank 1 has left");
        assert_eq!(peer.exit_code(), ExitCode::FAILURE);
        let input = lonely(|| Err(Failure::input("no such file")));
        assert!(matches!(input, Failure::Input(_)), "{input:?}");
    }

    #[test]
    fn the_most_ranks_are_allowed() {
        assert_eq!(check(64, 64), Ok(()));
        let refused = "65 ranks: at most 64 run as threads of one process".to_owned();
        assert_eq!(check(65, 64), Err(refused));
    }
}
