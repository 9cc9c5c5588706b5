//! The two early ends: of the world, once, and of an epoch. PROTOCOL.md, "The two early ends".

use std::collections::BTreeMap;
use std::time::Duration;

use super::from_now;
use crate::Error;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex};

/// Whether the world, or an epoch of it, has ended, and how. The first end of each wins.
#[derive(Debug, Default)]
pub(crate) struct Status {
    /// Whether `ends` says anything: what each call reads first. Never falls back.
    raised: AtomicBool,
    ends: Mutex<Ends>,
    /// Rung when the world ends, and when a rank leaves: a rank that a fault holds up sleeps on it.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Ends {
    world: Option<Error>,
    /// By epoch. Of those that every rank has left behind, the last is kept, and stands for all of them.
    epochs: BTreeMap<u64, Error>,
}

impl Ends {
    /// The end of an epoch, by which those before it are over, too.
    fn of(&self, epoch: u64) -> Option<&Error> {
        let of_epoch = || self.epochs.range(epoch..).next().map(|(_, end)| end);
        self.world.as_ref().or_else(of_epoch)
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

    /// Whether an operation may go on that was issued before its epoch ended.
    pub(crate) fn check_world(&self) -> Result<(), Error> {
        if !self.raised.load(Ordering::Acquire) {
            return Ok(());
        }
        self.world_end().map_or(Ok(()), Err)
    }

    /// The end of the world, if it has ended.
    pub(crate) fn world_end(&self) -> Option<Error> {
        self.ends.lock().world.clone()
    }

    /// Whether `epoch` was aborted, so that a rank may leave it behind.
    pub(crate) fn is_aborted(&self, epoch: u64) -> bool {
        self.raised.load(Ordering::Acquire) && self.ends.lock().epochs.contains_key(&epoch)
    }

    /// Ends the world. Returns the error with which it ended, which is another one if another rank came first.
    pub(crate) fn end_world(&self, error: Error) -> Error {
        let mut ends = self.ends.lock();
        let end = ends.world.get_or_insert(error).clone();
        self.raised.store(true, Ordering::Release);
        self.changed.notify_all();
        end
    }

    /// Has those that sleep look around.
    pub(crate) fn ring(&self) {
        let _ends = self.ends.lock();
        self.changed.notify_all();
    }

    /// Sleeps for so long, or until the world ends, or something is `over` for which a thread [rings](Self::ring). Returns the error that
    /// ended the world, if it has ended.
    pub(crate) fn sleep(&self, time: Duration, over: impl Fn() -> bool) -> Option<Error> {
        let until = from_now(time);
        let mut ends = self.ends.lock();
        while ends.world.is_none() && !over() {
            if self.changed.wait_until(&mut ends, until).timed_out() {
                break;
            }
        }
        ends.world.clone()
    }

    /// Ends `epoch`. Returns the error with which it ended, which is another one if another rank came first, if every rank has left the
    /// epoch behind, or if the world is over: a rank that hears of that gives its step up, which all others know.
    pub(crate) fn end_epoch(&self, epoch: u64, error: Error) -> Error {
        let mut ends = self.ends.lock();
        if let Some(end) = ends.of(epoch) {
            return end.clone();
        }
        ends.epochs.insert(epoch, error.clone());
        self.raised.store(true, Ordering::Release);
        error
    }

    /// Forgets how the epochs before `epoch` ended, which every rank has left behind, except for the last.
    pub(crate) fn forget_before(&self, epoch: u64) {
        let mut ends = self.ends.lock();
        ends.epochs = ends.epochs.split_off(&epoch.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use hsdp_sharding::Rank;

    use super::*;

    fn aborted(reason: &str) -> Error {
        Error::StepAborted { rank: Rank::new(0), step: 3, reason: reason.into(), mistake: None }
    }

    #[test]
    fn a_step_that_is_given_up_because_the_world_is_over_is_no_other_end() {
        let status = Status::default();
        let world = status.end_world(aborted("stands for the end of a world"));
        assert_eq!(status.end_epoch(0, aborted("the world is over")), world);
        assert_eq!(status.check(0), Err(world));
    }
}
