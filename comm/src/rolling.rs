//! The operations of a rank that NCCL carries between processes: counted, and hashed for each group. No message carries their
//! descriptors, so ranks compare the hashes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use hsdp_sharding::{Rank, UnitId, UnitLayout};
use xxhash_rust::xxh3::Xxh3;

use crate::sync::Mutex;
use crate::{Counts, Descriptor, GroupId, Op, Scaling, Tag};

#[cfg(test)]
pub(crate) mod tests;

/// The hash of a group's operations, one after the other. It is 0 before the first of them.
pub(crate) type RollingHash = [u8; 16];

/// The number of last entries that each group keeps.
pub(crate) const KEPT: usize = 256;

/// An operation that was issued.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) group: GroupId,
    /// Its number among the operations of its group, from 0, over all epochs.
    pub(crate) index: u64,
    /// The hash of its group after it.
    pub(crate) hash: RollingHash,
    /// The call. A drained operation has none: this rank did not call it.
    pub(crate) descriptor: Option<Arc<Descriptor>>,
}

/// The counters and hashes of one rank.
#[derive(Debug, Default)]
pub(crate) struct Rolling(Mutex<Issued>);

#[derive(Debug, Default)]
struct Issued {
    /// The last entries of each group, at most [`KEPT`].
    groups: HashMap<GroupId, VecDeque<Entry>>,
}

/// A rank's place in a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Membership {
    pub(crate) group: GroupId,
    pub(crate) slot: usize,
    pub(crate) size: usize,
}

impl Rolling {
    /// Counts an operation that is issued now, as its rank describes it to the others. `called` is the [digest](called) of
    /// the function and the layout.
    pub(crate) fn note(&self, descriptor: &Arc<Descriptor>, called: u64) -> Entry {
        let mut issued = self.0.lock();
        let group = descriptor.group;
        let (index, before) = issued.now(group);
        let hash = hash(before, descriptor, called);
        let descriptor = Some(Arc::clone(descriptor));
        let entry = Entry { group, index, hash, descriptor };
        issued.keep(entry.clone());
        entry
    }

    /// Takes over the entry of another member, whose operation this rank has issued in its place. It is the next one of its group.
    #[cfg_attr(not(any(test, feature = "nccl")), expect(dead_code, reason = "drains use it"))]
    pub(crate) fn adopt(&self, entry: Entry) {
        self.0.lock().keep(Entry { descriptor: None, ..entry });
    }

    /// The number of operations of a group so far.
    #[cfg_attr(not(any(test, feature = "nccl")), expect(dead_code, reason = "drains use it"))]
    pub(crate) fn count(&self, group: GroupId) -> u64 {
        self.0.lock().now(group).0
    }

    /// Counts a group in which nothing may have been issued yet.
    pub(crate) fn know(&self, group: GroupId) {
        self.0.lock().groups.entry(group).or_default();
    }

    /// The groups that are known, each with its last entries.
    pub(crate) fn kept(&self) -> BTreeMap<GroupId, Vec<Entry>> {
        let issued = self.0.lock();
        let kept =
            |(group, kept): (&GroupId, &VecDeque<Entry>)| (*group, kept.iter().cloned().collect());
        issued.groups.iter().map(kept).collect()
    }

    /// The rank's share of the check of `groups`: the sum of all ranks' words is 0, modulo 2^128, if the members of each group
    /// issued the same operations. If they did not, it is 0 with a probability of about 2^-128.
    pub(crate) fn word(&self, groups: impl IntoIterator<Item = Membership>) -> u128 {
        let issued = self.0.lock();
        let share = |it: Membership| {
            let (_, hash) = issued.now(it.group);
            it.coefficient().wrapping_mul(u128::from_le_bytes(hash))
        };
        groups.into_iter().map(share).fold(0, u128::wrapping_add)
    }
}

impl Issued {
    /// The number of operations of a group, and the hash of all of them.
    fn now(&self, group: GroupId) -> (u64, RollingHash) {
        let last = self.groups.get(&group).and_then(VecDeque::back);
        last.map_or_else(Default::default, |last| (last.index + 1, last.hash))
    }

    fn keep(&mut self, entry: Entry) {
        debug_assert_eq!(entry.index, self.now(entry.group).0, "no number is left out");
        let kept = self.groups.entry(entry.group).or_default();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(entry);
    }
}

impl Membership {
    /// The coefficient of this member. Those of all members of a group add up to 0.
    fn coefficient(&self) -> u128 {
        let next = (self.slot + 1) % self.size;
        self.random(self.slot).wrapping_sub(self.random(next))
    }

    /// A number without pattern, the same on all ranks.
    fn random(&self, slot: usize) -> u128 {
        u128::from_le_bytes(hash_of(&[self.group.get(), slot as u64]))
    }
}

/// A digest of the called function and of the layout of the unit that was passed.
pub(crate) fn called(function: u8, layout: Option<&UnitLayout>) -> u64 {
    use std::hash::Hash as _;
    let mut hash = Xxh3::new();
    (function, layout).hash(&mut hash);
    hash.digest()
}

/// The hash after an operation: of the hash before it, and of all in which members must agree.
fn hash(before: RollingHash, descriptor: &Descriptor, called: u64) -> RollingHash {
    let Descriptor { group, channel, epoch, sequence, op, reduction, .. } = *descriptor;
    let Descriptor { dtype, ref counts, root, peer: _, scaling, tag, .. } = *descriptor;
    let Tag { stage, unit, step, microbatch } = tag;
    let (is_split, count) = match counts {
        Counts::Each(count) => (0, *count),
        Counts::Splits { .. } => (1, 0),
    };
    let kinds = [
        channel as u8,
        // The two ends of a transfer.
        if op == Op::Recv { Op::Send as u8 } else { op as u8 },
        reduction.map_or(0, |it| it as u8 + 1),
        dtype.map_or(0, |it| it as u8 + 1),
        scaling.map_or(0, |it| it.wire.dtype() as u8 + 1),
        stage as u8,
        is_split,
        0,
    ];
    let divisors = |Scaling { pre, post, .. }: Scaling| {
        u64::from(pre.value().to_bits()) << 32 | u64::from(post.value().to_bits())
    };
    let [low, high] = words(before);
    hash_of(&[
        low,
        high,
        group.get(),
        epoch,
        sequence,
        u64::from_le_bytes(kinds),
        count as u64,
        root.map(Rank::get).map_or(0, |root| u64::from(root) + 1),
        scaling.map_or(0, divisors),
        unit.map(UnitId::get).map_or(0, |unit| u64::from(unit) + 1),
        step,
        microbatch as u64,
        called,
    ])
}

/// The first half of the hash of these words.
fn hash_of<const N: usize>(words: &[u64; N]) -> RollingHash {
    let bytes = words.map(u64::to_le_bytes);
    let hash = blake3::hash(bytes.as_flattened());
    *hash.as_bytes().first_chunk().expect("it has 32 bytes")
}

/// A hash as two words, as messages have it.
pub(crate) fn words(hash: RollingHash) -> [u64; 2] {
    let word = u128::from_le_bytes(hash);
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    [word as u64, (word >> 64) as u64]
}
