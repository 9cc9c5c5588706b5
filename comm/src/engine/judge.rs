//! Finds the ranks that keep others from going on, in the states of all ranks. JUDGE.md.

mod circle;
mod issued;
mod state;
#[cfg(test)]
mod tests;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hsdp_sharding::Rank;

use self::circle::circle;
pub(crate) use self::issued::Issued;
#[cfg(test)]
pub(crate) use self::issued::Numbers;
pub(crate) use self::state::{MemberWait, RankState, Rolled, Wait, WaitKey};
use crate::mismatch::{Mismatch, MismatchRow};
use crate::{Descriptor, Error, GroupId};

/// States of ranks, each from some moment of one look. A rank without a state counts as one that has issued nothing and waits for
/// nothing.
pub(crate) type Look = BTreeMap<Rank, RankState>;

/// Why no rank may ever go on.
#[derive(Debug, PartialEq)]
pub(crate) enum Finding {
    /// Ranks have other hashes after this call of a group, and after none before it that they still have.
    Differ(GroupId, u64),
    /// A rank has left, and another waits for it in this operation.
    Left(Rank, Arc<Descriptor>),
    /// Ranks wait for each other: the wait of each of them, and of each that waits for one of them.
    Circle(Vec<MismatchRow>),
}

/// Judges the states of two looks, of which `before` ended before `look` began.
pub(crate) fn judge(look: &Look, before: &Look) -> Option<Finding> {
    difference(look)
        .map(|(group, index)| Finding::Differ(group, index))
        .or_else(|| left(look, before))
        .or_else(|| Some(circle(look, before)).filter(|rows| !rows.is_empty()).map(Finding::Circle))
}

/// The error that says that these ranks wait for each other.
pub(crate) fn waiting_for_each_other(rows: Vec<MismatchRow>) -> Error {
    let problem = "ranks wait for each other in different operations".to_owned();
    Error::CollectiveMismatch { table: Arc::new(Mismatch { problem, rows }) }
}

/// The first call of a group after which two ranks have other hashes.
pub(crate) fn difference(look: &Look) -> Option<(GroupId, u64)> {
    let (mut known, mut first) = (BTreeMap::new(), BTreeMap::new());
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

/// The first of these groups in which ranks have other numbers of calls: only their earlier hashes can be compared.
pub(crate) fn uneven(look: &Look, mut groups: impl Iterator<Item = GroupId>) -> Option<GroupId> {
    groups.find(|group| {
        let counts = look.values().filter_map(|it| it.rolled.get(group)).map(|it| it.count);
        counts.clone().min() != counts.max()
    })
}

/// A rank that has left, and that another waits for in both looks.
fn left(look: &Look, before: &Look) -> Option<Finding> {
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
            Some(Finding::Left(gone, Arc::clone(&wait.operation)))
        })
    })
}

/// Whether `rank` was in this wait in the look before, too: then it has been in it all the time.
fn waits_still(rank: Rank, wait: &MemberWait, before: &Look) -> bool {
    before.get(&rank).is_some_and(|state| state.members().any(|it| it.is_as(wait)))
}

/// The ranks that keep `rank` in this wait: it misses them, and they have not issued the operation. From others a message is under way.
fn edges<'a>(look: &'a Look, rank: Rank, wait: &'a MemberWait) -> impl Iterator<Item = Rank> + 'a {
    let is_short = move |other: &Rank| {
        *other == rank || look.get(other).is_none_or(|state| !state.has_issued(wait))
    };
    wait.missing.iter().copied().filter(is_short)
}

/// The rank that keeps a wait of `rank` from ending.
///
/// Its edges are followed to ranks that wait for no other, or to the rank whose gradient is being read: the lowest of them. If there is none, the
/// lowest rank that a reached one misses. `None` if work takes long, and no code of users is called.
pub(crate) fn culprit(look: &Look, rank: Rank, wait: &Wait) -> Option<Rank> {
    let (mut culprits, mut awaited) = (BTreeSet::new(), BTreeSet::new());
    let (mut reached, mut followed) = (vec![(rank, wait)], 0);
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
