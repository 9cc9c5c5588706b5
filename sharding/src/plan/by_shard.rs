//! Numbers by shard index, of which many in a row are equal.

use std::collections::BTreeMap;
use std::ops::Range;

/// A number for each shard index. It is stored where it changes, so its size does not depend on the number of shards.
#[derive(Clone, Debug, Default)]
pub(super) struct ByShard {
    /// The shard index from which on a number holds, ascending. Before the first the number is 0.
    runs: Vec<(usize, u64)>,
}

impl ByShard {
    /// Returns the sums of amounts by shard index. An amount counts for every shard index in its range.
    /// No sum may exceed `u64::MAX`.
    pub(super) fn sums(amounts: impl Iterator<Item = (Range<usize>, u64)>) -> Self {
        let mut changes = BTreeMap::<usize, u64>::new();
        for (shards, amount) in amounts.filter(|(shards, amount)| !shards.is_empty() && *amount > 0)
        {
            let start = changes.entry(shards.start).or_default();
            *start = start.wrapping_add(amount);
            let end = changes.entry(shards.end).or_default();
            *end = end.wrapping_sub(amount);
        }
        let mut sum = 0u64;
        let runs = changes.into_iter().map(|(shard_index, change)| {
            sum = sum.wrapping_add(change);
            (shard_index, sum)
        });
        Self { runs: runs.collect() }
    }

    /// The number of a shard index.
    pub(super) fn at(&self, shard_index: usize) -> u64 {
        match self.runs.partition_point(|(start, _)| *start <= shard_index) {
            0 => 0,
            behind => self.runs[behind - 1].1,
        }
    }

    /// The shard indices from which on the number may be another.
    pub(super) fn starts(&self) -> impl Iterator<Item = usize> {
        self.runs.iter().map(|(start, _)| *start)
    }

    /// The largest number of all.
    pub(super) fn most(&self) -> u64 {
        self.runs.iter().map(|(_, number)| *number).max().unwrap_or(0)
    }
}

/// The pieces into which shards of `shard_len` elements cut the range of a parameter in its region: shard indices, and the number of
/// elements that each of these shards has. There are a first piece, whole shards, and a last piece, as far as they exist.
pub(super) fn cut(
    range: Range<usize>,
    shard_len: usize,
) -> impl Iterator<Item = (Range<usize>, usize)> {
    let (first, last) = (range.start / shard_len, (range.end - 1) / shard_len);
    let end = range.end.min((first + 1) * shard_len);
    let head = (first..first + 1, end - range.start);
    let whole = (first + 1..last, shard_len);
    let tail = (last.max(first + 1)..last + 1, range.end - last * shard_len);
    [head, whole, tail].into_iter().filter(|(shards, _)| !shards.is_empty())
}
