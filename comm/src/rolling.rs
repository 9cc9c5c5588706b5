//! The operations of a rank that NCCL carries between processes: counted, and hashed for each
//! group. No message carries their descriptors, so ranks compare the hashes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hsdp_sharding::UnitLayout;
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::sync::Mutex;
use crate::{Counts, Descriptor, GroupId, Op};

#[cfg(test)]
pub(crate) mod tests;

/// The hash of a group's operations, one after the other. It is 0 before the first of them.
pub(crate) type RollingHash = [u8; 16];

/// The number of last entries that each group keeps.
pub(crate) const KEPT: usize = 256;

/// An operation that was issued.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RolledCall {
    pub(crate) group: GroupId,
    /// Its number among the operations of its group, from 0, over all epochs.
    pub(crate) index: u64,
    /// The hash of its group after it.
    pub(crate) hash: RollingHash,
    /// The call. A drained operation has none: this rank did not call it.
    pub(crate) descriptor: Option<Arc<Descriptor>>,
}

/// The last entries of each group, at most [`KEPT`].
type RolledGroups = BTreeMap<GroupId, VecDeque<RolledCall>>;

/// The counters and hashes of one rank.
#[derive(Debug, Default)]
pub(crate) struct Rolling(Mutex<RolledGroups>);

/// A rank's place in a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupMembership {
    pub(crate) group: GroupId,
    pub(crate) slot: usize,
    pub(crate) size: usize,
}

impl Rolling {
    /// Counts an operation that is issued now, as its rank describes it to the others. `signature`
    /// is the [digest](signature) of the function and the layout.
    pub(crate) fn note(&self, descriptor: &Arc<Descriptor>, signature: u64) -> RolledCall {
        let mut groups = self.0.lock();
        let group = descriptor.group;
        let (index, before) = now(&groups, group);
        let hash = hash(before, descriptor, signature);
        let entry = RolledCall { group, index, hash, descriptor: Some(Arc::clone(descriptor)) };
        keep(&mut groups, entry.clone());
        entry
    }

    /// Takes over the entry of another member, whose operation this rank has issued in its place.
    /// It is the next one of its group.
    #[cfg_attr(not(any(test, feature = "nccl")), expect(dead_code, reason = "drains use it"))]
    pub(crate) fn adopt(&self, entry: RolledCall) {
        keep(&mut self.0.lock(), RolledCall { descriptor: None, ..entry });
    }

    /// The number of operations of a group so far.
    #[cfg_attr(not(any(test, feature = "nccl")), expect(dead_code, reason = "drains use it"))]
    pub(crate) fn count(&self, group: GroupId) -> u64 {
        now(&self.0.lock(), group).0
    }

    /// Counts a group in which nothing may have been issued yet.
    pub(crate) fn know(&self, group: GroupId) {
        self.0.lock().entry(group).or_default();
    }

    /// The groups that are known, each with its last entries.
    pub(crate) fn kept(&self) -> BTreeMap<GroupId, Vec<RolledCall>> {
        let all = self.0.lock();
        all.iter().map(|(group, kept)| (*group, kept.iter().cloned().collect())).collect()
    }

    /// The rank's share of the check of `groups`: the sum of all ranks' words is 0, modulo 2^128,
    /// if the members of each group issued the same operations. If they did not, it is 0 with a
    /// probability of about 2^-128.
    pub(crate) fn word(&self, groups: impl IntoIterator<Item = GroupMembership>) -> u128 {
        let all = self.0.lock();
        let share = |it: GroupMembership| {
            let (_, hash) = now(&all, it.group);
            it.coefficient().wrapping_mul(u128::from_le_bytes(hash))
        };
        groups.into_iter().map(share).fold(0, u128::wrapping_add)
    }
}

/// The number of operations of a group, and the hash of all of them.
fn now(groups: &RolledGroups, group: GroupId) -> (u64, RollingHash) {
    let last = groups.get(&group).and_then(VecDeque::back);
    last.map_or_else(Default::default, |last| (last.index + 1, last.hash))
}

fn keep(groups: &mut RolledGroups, entry: RolledCall) {
    debug_assert_eq!(entry.index, now(groups, entry.group).0, "no number is left out");
    let kept = groups.entry(entry.group).or_default();
    if kept.len() == KEPT {
        kept.pop_front();
    }
    kept.push_back(entry);
}

impl GroupMembership {
    /// The coefficient of this member. Those of all members of a group add up to 0.
    fn coefficient(&self) -> u128 {
        let next = (self.slot + 1) % self.size;
        self.random(self.slot).wrapping_sub(self.random(next))
    }

    /// A number without pattern, the same on all ranks.
    fn random(&self, slot: usize) -> u128 {
        u128::from_le_bytes(hash_of(&(self.group, slot)))
    }
}

/// Returns a digest of the function that was called, and of the layout of the unit and the cuts of
/// the buffer that were passed.
pub(crate) fn signature(function: u8, layout: Option<&UnitLayout>, cuts: Option<&[usize]>) -> u64 {
    use std::hash::Hash as _;
    let mut hash = Xxh3::new();
    (function, layout, cuts).hash(&mut hash);
    hash.digest()
}

/// The hash after an operation: of the hash before it, and of all in which members must agree.
fn hash(before: RollingHash, descriptor: &Descriptor, signature: u64) -> RollingHash {
    let Descriptor { op, ref counts, .. } = *descriptor;
    let counts = match counts {
        Counts::Each(count) => Counts::Each(*count),
        Counts::Splits { .. } => Counts::Splits { send: Vec::new(), receive: Vec::new() },
    };
    // The two ends of a transfer.
    let op = if op == Op::Recv { Op::Send } else { op };
    hash_of(&(before, Descriptor { op, counts, peer: None, ..descriptor.clone() }, signature))
}

/// The first half of the hash of a value, as bytes of which each value has its own.
fn hash_of(value: &impl Serialize) -> RollingHash {
    let bytes = postcard::to_allocvec(value).expect("numbers and lists are written into memory");
    *blake3::hash(&bytes).as_bytes().first_chunk().expect("it has 32 bytes")
}
