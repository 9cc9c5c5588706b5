//! The two early ends: of the world, once, and of an epoch. PROTOCOL.md, "The two early ends".

use std::collections::BTreeMap;

use crate::Error;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};

/// Whether the world, or an epoch of it, has ended, and how. The first end of each wins.
#[derive(Debug, Default)]
pub(crate) struct Status {
    /// Whether `ends` says anything: what each call reads first. Never falls back.
    raised: AtomicBool,
    ends: Mutex<Ends>,
}

#[derive(Debug, Default)]
struct Ends {
    world: Option<Error>,
    epochs: BTreeMap<u64, Error>,
}

impl Status {
    /// Whether an operation may be issued in `epoch`.
    pub(crate) fn check(&self, epoch: u64) -> Result<(), Error> {
        if !self.raised.load(Ordering::Acquire) {
            return Ok(());
        }
        let ends = self.ends.lock();
        match ends.world.as_ref().or_else(|| ends.epochs.get(&epoch)) {
            Some(end) => Err(end.clone()),
            None => Ok(()),
        }
    }

    /// What ended the world, if it has ended.
    pub(crate) fn world_end(&self) -> Option<Error> {
        self.ends.lock().world.clone()
    }

    /// Whether `epoch` was aborted, so that a rank may leave it behind.
    pub(crate) fn is_aborted(&self, epoch: u64) -> bool {
        self.raised.load(Ordering::Acquire) && self.ends.lock().epochs.contains_key(&epoch)
    }

    /// Ends the world; what it ended with, which is another error if another rank came first.
    pub(crate) fn end_world(&self, error: Error) -> Error {
        let mut ends = self.ends.lock();
        let end = ends.world.get_or_insert(error).clone();
        self.raised.store(true, Ordering::Release);
        end
    }

    /// Ends `epoch`; what it ended with, which is another error if another rank came first.
    pub(crate) fn end_epoch(&self, epoch: u64, error: Error) -> Error {
        let mut ends = self.ends.lock();
        let end = ends.epochs.entry(epoch).or_insert(error).clone();
        self.raised.store(true, Ordering::Release);
        end
    }

    /// Forgets the ends of the epochs before `epoch`, which every rank has left behind.
    pub(crate) fn forget_before(&self, epoch: u64) {
        let mut ends = self.ends.lock();
        ends.epochs = ends.epochs.split_off(&epoch);
    }
}
