//! Where members find the operation that they mean.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crossbeam::utils::CachePadded;

use super::operation::{Occasion, Operation};
use crate::spare::Aside;
use crate::sync::Mutex;
use crate::work::Work;
use crate::{Descriptor, Error, GroupId};

/// What tells one operation from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) group: GroupId,
    pub(crate) epoch: u64,
    pub(crate) sequence: u64,
}

impl From<&Descriptor> for Key {
    fn from(descriptor: &Descriptor) -> Self {
        let Descriptor { group, epoch, sequence, .. } = *descriptor;
        Self { group, epoch, sequence }
    }
}

/// A group's id is a hash already, and the rest of a key counts up: it need only be stirred in. Nobody chooses keys so that
/// they collide.
#[derive(Default)]
struct Stirred(u64);

impl Hasher for Stirred {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, part: u64) {
        // An odd number near 2^64 divided by the golden ratio: neighbours end up far apart.
        self.0 = (self.0.rotate_left(29) ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

type Operations = HashMap<Key, Arc<Operation>, BuildHasherDefault<Stirred>>;

/// Operations whose members all have their outputs, by group: for those to come.
type Over = HashMap<GroupId, Aside<Operation>, BuildHasherDefault<Stirred>>;

/// Of how many groups of a part operations are kept that are over.
const GROUPS: usize = 1 << 6;

/// The operations of some groups.
#[derive(Debug, Default)]
struct Shard {
    there: Operations,
    over: Over,
}

/// A model has fewer, since each is one more point at which threads may take turns.
const SHARDS: usize = if cfg!(shuttle) { 2 } else { 16 };

/// The operations that somebody has arrived at and not everybody; and, as memory for others, those that are over.
///
/// Cut by group, so that groups rarely share a lock. No other lock is taken while one of these is held,
/// except that of the status.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Apart in memory: who takes one does not slow the others.
    shards: [CachePadded<Mutex<Shard>>; SHARDS],
}

impl Table {
    /// The operation of an occasion, made if this is its first member, provided that `admit` lets it.
    ///
    /// `admit` is asked under the lock: an early end that was announced before is seen, and one that is
    /// announced afterwards finds the operation here.
    pub(crate) fn enter<D: Send + 'static, W: Work>(
        &self,
        occasion: Occasion,
        admit: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Arc<Operation>, Error> {
        let key = occasion.key;
        let mut shard = self.shard(key).lock();
        if let Some(operation) = shard.there.get(&key) {
            return Ok(Arc::clone(operation));
        }
        admit()?;
        let operation = shard.make::<D, W>(occasion);
        shard.there.insert(key, Arc::clone(&operation));
        Ok(operation)
    }

    /// An operation gathers again, provided that `admit` lets it, which is asked as in [`enter`](Self::enter).
    pub(crate) fn readmit(
        &self,
        operation: &Arc<Operation>,
        admit: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let key = operation.key();
        let mut shard = self.shard(key).lock();
        admit()?;
        shard.there.insert(key, Arc::clone(operation));
        Ok(())
    }

    /// Everybody has arrived.
    pub(crate) fn remove(&self, key: Key) {
        let removed = self.shard(key).lock().there.remove(&key);
        drop(removed);
    }

    /// All members have their outputs: another operation of the group may take its memory.
    pub(crate) fn put_aside(&self, operation: Arc<Operation>) {
        let key = operation.key();
        self.shard(key).lock().put_aside(operation);
    }

    /// Takes out the operations of `epoch`, or of all.
    pub(crate) fn drain(&self, epoch: Option<u64>) -> Vec<Arc<Operation>> {
        let matches = |key: &Key| epoch.is_none_or(|epoch| key.epoch == epoch);
        let drained = |shard: &CachePadded<Mutex<Shard>>| {
            let taken = shard.lock().there.extract_if(|key, _| matches(key)).collect::<Vec<_>>();
            in_order(taken)
        };
        self.shards.iter().flat_map(drained).collect()
    }

    /// All operations that are there now.
    pub(crate) fn snapshot(&self) -> Vec<Arc<Operation>> {
        let listed = |shard: &CachePadded<Mutex<Shard>>| {
            let shard = shard.lock();
            let listed = shard.there.iter().map(|(key, operation)| (*key, Arc::clone(operation)));
            in_order(listed.collect())
        };
        self.shards.iter().flat_map(listed).collect()
    }

    fn shard(&self, key: Key) -> &Mutex<Shard> {
        #[expect(clippy::cast_possible_truncation, reason = "the remainder is small")]
        let index = (key.group.get() % SHARDS as u64) as usize;
        &self.shards[index]
    }
}

impl Shard {
    fn make<D: Send + 'static, W: Work>(&mut self, occasion: Occasion) -> Arc<Operation> {
        let over = self.over.get_mut(&occasion.key.group);
        match over.and_then(Aside::take_newest) {
            Some(mut over) => {
                over.renew::<D, W>(occasion);
                over.share()
            }
            None => Arc::new(Operation::new::<D, W>(occasion)),
        }
    }

    fn put_aside(&mut self, operation: Arc<Operation>) {
        let group = operation.key().group;
        let groups = self.over.len();
        match self.over.get_mut(&group) {
            Some(over) => over.put(operation),
            None if groups < GROUPS => self.over.entry(group).or_default().put(operation),
            None => {}
        }
    }
}

/// Operations in the order of their keys: a map has another in each run, and the first of them may be named in an error.
fn in_order(mut taken: Vec<(Key, Arc<Operation>)>) -> impl Iterator<Item = Arc<Operation>> {
    taken.sort_unstable_by_key(|(key, _)| *key);
    taken.into_iter().map(|(_, operation)| operation)
}
