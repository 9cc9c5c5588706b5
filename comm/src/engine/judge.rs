//! Finds the ranks that keep others from going on, in the states of all ranks. JUDGE.md.

mod state;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

pub(crate) use self::state::{MemberWait, RankState, Rolled, Wait, WaitKey};
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::{Descriptor, Error, GroupId, WorldError};

/// States of ranks, each from some moment of one look. A rank without a state counts as one that
/// has issued nothing and waits for nothing.
pub(crate) type Look = BTreeMap<Rank, RankState>;

/// Why no rank may ever go on.
#[derive(Debug, PartialEq)]
pub(crate) enum JudgeFinding {
    /// Ranks have other hashes after this call of a group, and after none before it that they still
    /// have.
    Differ(GroupId, u64),
    /// A rank has left, and another waits for it in this operation.
    Left(Rank, Arc<Descriptor>),
    /// Ranks wait for each other: the wait of each of them, and of each that waits for one of them.
    Circle(Vec<MismatchRow>),
}

/// Judges the states of two looks, of which `before` ended before `look` began.
pub(crate) fn judge(look: &Look, before: &Look) -> Option<JudgeFinding> {
    difference(look)
        .map(|(group, index)| JudgeFinding::Differ(group, index))
        .or_else(|| left(look, before))
        .or_else(|| {
            Some(circle(look, before)).filter(|rows| !rows.is_empty()).map(JudgeFinding::Circle)
        })
}

/// The error that says that these ranks wait for each other.
pub(crate) fn waiting_for_each_other(rows: Vec<MismatchRow>) -> Error {
    let problem = "ranks wait for each other in different operations".to_owned();
    WorldError::Mismatch(Arc::new(Mismatch { problem, rows })).into()
}

/// The first call of a group after which two ranks have other hashes.
pub(crate) fn difference(look: &Look) -> Option<(GroupId, u64)> {
    let mut known = BTreeMap::new();
    let mut first = BTreeMap::new();
    let rolled = look.values().flat_map(|state| &state.rolled);
    for (group, (index, hash)) in
        rolled.flat_map(|(group, it)| it.hashes.iter().map(move |it| (*group, it)))
    {
        if *known.entry((group, *index)).or_insert(*hash) != *hash {
            let first = first.entry(group).or_insert(*index);
            *first = (*first).min(*index);
        }
    }
    first.into_iter().next()
}

/// The groups of NCCL in which a device waits.
pub(crate) fn awaited(look: &Look) -> impl Iterator<Item = GroupId> {
    let waits = look.values().flat_map(RankState::members).filter(|it| it.index.is_some());
    waits.map(|it| it.operation.group)
}

/// The groups of NCCL that ranks know.
pub(crate) fn known(look: &Look) -> impl Iterator<Item = GroupId> {
    look.values().flat_map(|state| state.rolled.keys().copied())
}

/// The first of these groups in which ranks have other numbers of calls: only their earlier hashes
/// can be compared.
pub(crate) fn uneven(look: &Look, mut groups: impl Iterator<Item = GroupId>) -> Option<GroupId> {
    groups.find(|group| {
        let counts = look.values().filter_map(|it| it.rolled.get(group)).map(|it| it.count);
        counts.clone().min() != counts.max()
    })
}

/// A rank that has left, and that another waits for in both looks.
fn left(look: &Look, before: &Look) -> Option<JudgeFinding> {
    if !look.values().any(|state| state.has_left) {
        return None;
    }
    look.iter().find_map(|(rank, state)| {
        let has_left =
            |other: &Rank| look.get(other).is_some_and(|it| it.has_left && it.is_beside(state));
        let gone = |wait: &MemberWait| edges(look, *rank, wait).find(has_left);
        let mut waits = state.members();
        waits.find_map(|wait| {
            let lasts = state.may_wait(wait) && waits_still(*rank, wait, before);
            let gone = gone(wait).filter(|_| lasts)?;
            Some(JudgeFinding::Left(gone, Arc::clone(&wait.operation)))
        })
    })
}

/// Whether `rank` was in this wait in the look before, too: then it has been in it all the time.
fn waits_still(rank: Rank, wait: &MemberWait, before: &Look) -> bool {
    before.get(&rank).is_some_and(|state| state.members().any(|it| it.is_as(wait)))
}

/// The ranks that keep `rank` in this wait: it misses them, and they have not issued the operation.
/// From others a message is under way.
fn edges<'a>(look: &'a Look, rank: Rank, wait: &'a MemberWait) -> impl Iterator<Item = Rank> + 'a {
    let is_short = move |other: &Rank| {
        *other == rank || look.get(other).is_none_or(|state| !state.has_issued(wait))
    };
    wait.missing.iter().copied().filter(is_short)
}

/// The rank that keeps a wait of `rank` from ending.
///
/// Its edges are followed to ranks that wait for no other, or to the rank whose gradient is being
/// read: the lowest of them. If there is none, the lowest rank that a reached one misses. `None` if
/// work takes long, and no code of users is called.
pub(crate) fn culprit(look: &Look, rank: Rank, wait: &Wait) -> Option<Rank> {
    let mut culprits = BTreeSet::new();
    let mut awaited = BTreeSet::new();
    let mut reached = vec![(rank, wait)];
    let mut followed = 0;
    while let Some((rank, wait)) = reached.get(followed).copied() {
        followed += 1;
        let members = match wait {
            Wait::Members(members) => members,
            Wait::Work(reading) => {
                culprits.extend(*reading);
                continue;
            }
        };
        for other in edges(look, rank, members) {
            let waits = look.get(&other).map_or(&[][..], |state| &state.waits);
            if waits.is_empty() { &mut culprits } else { &mut awaited }.insert(other);
            for wait in waits {
                let is_known = |it: &(Rank, &Wait)| std::ptr::eq(it.1, wait);
                if !reached.iter().any(is_known) {
                    reached.push((other, wait));
                }
            }
        }
    }
    culprits.first().or(awaited.first()).copied()
}

/// The states of the ranks that are reached from these waits, by way of the ranks that each misses.
pub(crate) fn reached(waits: &[Wait], state: impl Fn(Rank) -> RankState) -> Look {
    let mut look = Look::new();
    let mut awaited: Vec<Rank> = waits.iter().flat_map(Wait::missing).copied().collect();
    while let Some(rank) = awaited.pop() {
        if let Entry::Vacant(entry) = look.entry(rank) {
            let state = entry.insert(state(rank));
            awaited.extend(state.waits.iter().flat_map(Wait::missing));
        }
    }
    look
}

/// The waits that never end, by rank; none if there is an order in which all ranks go on.
///
/// A wait never ends if one of its edges leads to a rank whose issuer is in a wait that never ends.
fn circle(look: &Look, before: &Look) -> Vec<MismatchRow> {
    let mut stuck = in_both(look, before);
    loop {
        let of_issuers = stuck.iter().filter(|(_, wait)| wait.is_of_issuer);
        let issuers: BTreeSet<Rank> = of_issuers.map(|(rank, _)| *rank).collect();
        let count = stuck.len();
        let mut short = BTreeMap::new();
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

/// The operations that a rank has issued, by group: the numbers of a group come in order, except
/// where a fault swaps them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Issued(pub(crate) BTreeMap<GroupId, Numbers>);

/// The numbers of a group's operations in the last epoch in which the rank has issued on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Numbers {
    pub(crate) epoch: u64,
    pub(crate) next: u64,
    /// Numbers below `next` that were left out.
    pub(crate) skipped: BTreeSet<u64>,
}

impl Issued {
    pub(crate) fn note(&mut self, descriptor: &Descriptor) {
        let numbers = self.0.entry(descriptor.group).or_default();
        if numbers.epoch != descriptor.epoch {
            *numbers = Numbers { epoch: descriptor.epoch, ..Numbers::default() };
        }
        let number = descriptor.sequence;
        if number < numbers.next {
            numbers.skipped.remove(&number);
        } else {
            numbers.skipped.extend(numbers.next..number);
            numbers.next = number + 1;
        }
    }

    pub(crate) fn has(&self, descriptor: &Descriptor) -> bool {
        let Some(numbers) = self.0.get(&descriptor.group) else { return false };
        let is_of_this_epoch = || {
            descriptor.sequence < numbers.next && !numbers.skipped.contains(&descriptor.sequence)
        };
        // Operations of an epoch before are over.
        descriptor.epoch < numbers.epoch
            || (descriptor.epoch == numbers.epoch && is_of_this_epoch())
    }
}

#[cfg(test)]
mod tests;
