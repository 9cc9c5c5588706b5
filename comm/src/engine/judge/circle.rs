//! Ranks that wait for each other. JUDGE.md.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::{Look, MemberWait, edges, waits_still};
use crate::mismatch::{MismatchRow, Wanted};

/// The waits that never end, by rank; none if there is an order in which all ranks go on.
///
/// A wait never ends if one of its edges leads to a rank whose issuer is in a wait that never ends.
pub(super) fn circle(look: &Look, before: &Look) -> Vec<MismatchRow> {
    let mut stuck = in_both(look, before);
    loop {
        let of_issuers = stuck.iter().filter(|(_, wait)| wait.is_of_issuer);
        let issuers: BTreeSet<Rank> = of_issuers.map(|(rank, _)| *rank).collect();
        let (count, mut short) = (stuck.len(), BTreeMap::new());
        stuck.retain(|(rank, wait)| {
            // One list for all that wait in one operation.
            let short = short.entry(wait.key()).or_insert_with(|| short_of(look, wait, &issuers));
            let is_stuck = |other: &Rank| wait.missing.contains(other);
            short.iter().any(is_stuck) || (issuers.contains(rank) && is_stuck(rank))
        });
        if stuck.len() == count {
            return rows(look, &stuck);
        }
    }
}

/// The waits that are in both looks, and that no end of an epoch ends.
fn in_both<'a>(look: &'a Look, before: &Look) -> Vec<(Rank, &'a MemberWait)> {
    let mut waits = Vec::new();
    for (rank, state) in look {
        let lasts = |it: &&MemberWait| state.may_wait(it) && waits_still(*rank, it, before);
        waits.extend(state.members().filter(lasts).map(|wait| (*rank, wait)));
    }
    waits
}

/// The ranks of the same epoch among `issuers` that have not issued the operation of this wait.
fn short_of(look: &Look, wait: &MemberWait, issuers: &BTreeSet<Rank>) -> Vec<Rank> {
    let is_short = |rank: &Rank| {
        let state = &look[rank];
        state.epoch == wait.operation.epoch && !state.has_issued(wait)
    };
    issuers.iter().copied().filter(is_short).collect()
}

/// The row of each rank: the wait of its issuer, if that never ends.
fn rows(look: &Look, stuck: &[(Rank, &MemberWait)]) -> Vec<MismatchRow> {
    let mut waits = BTreeMap::new();
    for (rank, wait) in stuck {
        if wait.is_of_issuer || !waits.contains_key(rank) {
            waits.insert(*rank, *wait);
        }
    }
    let row = |(rank, wait): (Rank, &MemberWait)| {
        let missing = edges(look, rank, wait).collect();
        MismatchRow {
            rank,
            wanted: Wanted::Waiting { operation: Arc::clone(&wait.operation), missing },
        }
    };
    waits.into_iter().map(row).collect()
}
