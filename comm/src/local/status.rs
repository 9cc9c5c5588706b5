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
    /// The last epoch that every rank has left behind, and how it ended: what is before it, too, is over.
    past: Option<(u64, Error)>,
}

impl Ends {
    fn of(&self, epoch: u64) -> Option<&Error> {
        let past = self.past.as_ref().filter(|(last, _)| epoch <= *last).map(|(_, end)| end);
        self.world.as_ref().or(past).or_else(|| self.epochs.get(&epoch))
    }
}

impl Status {
    /// Whether an operation may be issued in `epoch`.
    pub(crate) fn check(&self, epoch: u64) -> Result<(), Error> {
        if !self.raised.load(Ordering::Acquire) {
            return Ok(());
        }
        self.ends.lock().of(epoch).map_or(Ok(()), |end| Err(end.clone()))
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

    /// Ends `epoch`; what it ended with, which is another error if another rank came first, or if every rank has
    /// left the epoch behind.
    pub(crate) fn end_epoch(&self, epoch: u64, error: Error) -> Error {
        let mut ends = self.ends.lock();
        if let Some((_, end)) = ends.past.as_ref().filter(|(last, _)| epoch <= *last) {
            return end.clone();
        }
        let end = ends.epochs.entry(epoch).or_insert(error).clone();
        self.raised.store(true, Ordering::Release);
        end
    }

    /// Forgets how the epochs before `epoch` ended, which every rank has left behind, except for the last.
    pub(crate) fn forget_before(&self, epoch: u64) {
        let mut ends = self.ends.lock();
        let kept = ends.epochs.split_off(&epoch);
        let forgotten = std::mem::replace(&mut ends.epochs, kept);
        // Ranks forget at once and in any order: what is past never becomes less.
        let past = forgotten.into_iter().next_back().into_iter().chain(ends.past.take());
        ends.past = past.max_by_key(|(epoch, _)| *epoch);
    }
}
