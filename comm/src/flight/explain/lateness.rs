//! Who is slow: how much later than the others a rank issues.

use std::collections::BTreeMap;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::operations::{Moment, Operation, since};
use super::{Lateness, OftenLast};

/// The largest lateness, and who was the last most often, of operations that all members have issued.
pub(super) fn of(operations: &[&Operation<'_>]) -> (Option<Lateness>, Option<OftenLast>) {
    let mut last: BTreeMap<Rank, usize> = BTreeMap::new();
    let mut worst: Option<Lateness> = None;
    let mut count = 0;
    for operation in operations {
        let Some((rank, late)) = last_of(operation) else { continue };
        *last.entry(rank).or_default() += 1;
        count += 1;
        if worst.as_ref().is_none_or(|worst| late > worst.late) {
            let entry = operation.entry(rank);
            worst = entry.map(|entry| Lateness { rank, late, operation: Box::new(*entry) });
        }
    }
    let often = last.into_iter().max_by_key(|(rank, times)| (*times, std::cmp::Reverse(*rank)));
    (worst, often.map(|(rank, times)| OftenLast { rank, times, of: count }))
}

/// Who issued an operation last, and how long after the median of the others.
fn last_of(operation: &Operation<'_>) -> Option<(Rank, Duration)> {
    let mut moments: Vec<(Moment, Rank)> = operation.moments().collect();
    moments.sort_unstable();
    let (last, rank) = moments.pop()?;
    let (median, _) = moments.get(moments.len().checked_sub(1)? / 2)?;
    Some((rank, since(*median, last)))
}
