//! The slow ranks: how much later than the others a rank issues.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use hsdp_sharding::Rank;

use super::operations::Operation;
use super::{Lateness, OftenLast};

/// The largest lateness, and the rank that was the last most often, of operations that all members have issued.
pub(super) fn of(operations: &[&Operation<'_>]) -> (Option<Lateness>, Option<OftenLast>) {
    let mut times: BTreeMap<Rank, usize> = BTreeMap::new();
    let mut worst: Option<Lateness> = None;
    let mut count = 0;
    for (rank, entry, late) in operations.iter().filter_map(|operation| operation.last()) {
        *times.entry(rank).or_default() += 1;
        count += 1;
        if worst.as_ref().is_none_or(|worst| late > worst.late) {
            worst = Some(Lateness { rank, late, operation: Box::new(*entry) });
        }
    }
    let often = times.into_iter().max_by_key(|(rank, times)| (*times, Reverse(*rank)));
    (worst, often.map(|(rank, times)| OftenLast { rank, times, of: count }))
}
