//! Numbers for all ranks that update a model, and the ranks that update equal parts of a unit.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Plan;
use crate::{Role, UnitId};

/// A number for each [updater](Plan::updater). It is stored where it changes, so its size does not
/// depend on the number of shards.
#[derive(Clone, Debug, Default)]
pub(super) struct ByUpdater {
    /// The updater from which on a number holds, ascending. Before the first the number is 0.
    runs: Vec<(usize, u64)>,
}

impl ByUpdater {
    /// Returns sums of amounts by updater. An amount counts for every updater in its range, and its
    /// place in the array tells the sum. No sum may exceed `u64::MAX`.
    pub(super) fn sums<const N: usize>(
        amounts: impl Iterator<Item = (Range<usize>, [u64; N])>,
    ) -> [Self; N] {
        let mut changes = [(); N].map(|()| BTreeMap::<usize, u64>::new());
        for (updaters, amounts) in amounts.filter(|(updaters, _)| !updaters.is_empty()) {
            for (changes, amount) in changes.iter_mut().zip(amounts).filter(|it| it.1 > 0) {
                let start = changes.entry(updaters.start).or_default();
                *start = start.wrapping_add(amount);
                let end = changes.entry(updaters.end).or_default();
                *end = end.wrapping_sub(amount);
            }
        }
        changes.map(|changes| {
            let mut sum = 0u64;
            let runs = changes.into_iter().map(|(updater, change)| {
                sum = sum.wrapping_add(change);
                (updater, sum)
            });
            Self { runs: runs.collect() }
        })
    }

    /// Returns the number of an updater.
    pub(super) fn at(&self, updater: usize) -> u64 {
        match self.runs.partition_point(|(start, _)| *start <= updater) {
            0 => 0,
            behind => self.runs[behind - 1].1,
        }
    }

    /// Returns the updaters from which on the number may be another.
    pub(super) fn starts(&self) -> impl Iterator<Item = usize> {
        self.runs.iter().map(|(start, _)| *start)
    }

    /// Returns the largest number of all.
    pub(super) fn most(&self) -> u64 {
        self.runs.iter().map(|(_, number)| *number).max().unwrap_or(0)
    }
}

/// Returns runs of updaters that together are all. The shards of a run have pieces of the same
/// trainable parameters of the unit, of the same lengths at the same places, so they are cut into
/// the same slices. For each replica that has slices of its own there are at most four runs a
/// parameter, and one more.
pub(super) fn alike(plan: &Plan, unit: UnitId) -> Vec<Range<usize>> {
    let layout = plan.layout(unit);
    let shards = layout.shard_size();
    let shard_len = layout.trainable().shard_len;
    let mut starts = vec![0, shards];
    let trainable = layout.params().iter().filter(|slot| slot.role == Role::Trainable);
    for range in trainable.map(|slot| slot.range()) {
        // The shards between the first and the last one of a parameter hold nothing else.
        let first = range.start / shard_len;
        let last = (range.end - 1) / shard_len;
        starts.extend([first, first + 1, last, last + 1]);
    }
    starts.sort_unstable();
    starts.dedup();
    let runs = starts.windows(2).map(|pair| pair[0]..pair[1]);
    let replicas = 0..plan.updaters() / shards;
    let of_replica = |replica| {
        let first = replica * shards;
        runs.clone().map(move |run| first + run.start..first + run.end)
    };
    replicas.flat_map(of_replica).collect()
}
