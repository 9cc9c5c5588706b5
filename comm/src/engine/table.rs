//! The operations for which members are missing, by their keys.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use super::operation::{Key, Operation};
use crate::Error;
use crate::sync::Mutex;

/// The operations of a world for which members are missing.
///
/// While a thread holds its lock, it takes no other, except that of the status.
#[derive(Debug, Default)]
pub(crate) struct Table(Mutex<BTreeMap<Key, Arc<Operation>>>);

impl Table {
    /// The operation of a key. `make` makes it for its first member, unless the step or the world has ended.
    ///
    /// `make` runs under the lock: it sees an early end that was written before, and a later one finds the operation here.
    pub(crate) fn enter(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<Arc<Operation>, Error>,
    ) -> Result<Arc<Operation>, Error> {
        match self.0.lock().entry(key) {
            Entry::Occupied(found) => Ok(Arc::clone(found.get())),
            Entry::Vacant(entry) => Ok(Arc::clone(entry.insert(make()?))),
        }
    }

    /// No member is missing any more, or none is to arrive.
    pub(crate) fn remove(&self, key: Key) {
        let removed = self.0.lock().remove(&key);
        drop(removed);
    }

    /// Takes out the operations of `epoch`, or of all epochs, in the order of their keys: an error may name the first of them.
    pub(crate) fn take_out(&self, epoch: Option<u64>) -> Vec<Arc<Operation>> {
        let mut operations = self.0.lock();
        let of_epoch = |key: &Key, _: &mut _| epoch.is_none_or(|epoch| key.epoch == epoch);
        operations.extract_if(.., of_epoch).map(|(_, operation)| operation).collect()
    }

    /// All operations that are there now, in the order of their keys.
    pub(crate) fn snapshot(&self) -> Vec<Arc<Operation>> {
        self.0.lock().values().cloned().collect()
    }
}
