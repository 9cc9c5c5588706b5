//! The state that a rank shows to the others: its step, its waits, its bytes, its mistakes between
//! steps; and the two early ends, of the world and of an epoch. PROTOCOL.md, "The two early ends".

use std::collections::BTreeMap;
use std::sync::{Arc, atomic as std_atomic};
use std::time::Duration;

use crossbeam::utils::CachePadded;
use hsdp_flight::Recorder;
use hsdp_sharding::Rank;

use super::from_now;
use super::operation::SharedOperation;
use crate::engine::judge::MemberWait;
use crate::ledger::Ledger;
use crate::rolling::Rolling;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, thread_local};
use crate::{Descriptor, Error, Mistake};

/// The public state of one rank. The rank writes it; threads that name the rank in an error read
/// it.
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// Bytes and calls of this rank.
    pub(crate) ledger: Ledger,
    /// Its last operations.
    pub(crate) flight: Recorder,
    /// Its operations that NCCL carries between processes.
    pub(crate) rolling: Rolling,
    rare: CachePadded<RareFields>,
    last: Mutex<Option<Arc<Descriptor>>>,
    /// Mistakes between steps, this rank's and those of others.
    mistakes: Mutex<Mistakes>,
    /// The call of NCCL in which its device waits.
    device_wait: Mutex<Option<MemberWait>>,
    /// The threads that do not go on, each with the operation without which it does not.
    blocked_on: Mutex<Vec<(u64, Arc<SharedOperation>)>>,
}

/// Fields that are read with each operation and rarely written: apart in memory from those that
/// each operation writes.
#[derive(Debug, Default)]
struct RareFields {
    step: AtomicU64,
    epoch: AtomicU64,
    left: AtomicBool,
    /// Whether `mistakes` has some that the rank may come to make: each operation looks here first.
    is_owed: AtomicBool,
    /// Number of epochs in which it has announced that it sends no more. It is counted for ranks
    /// that share no memory with this one.
    stopped: AtomicU64,
    /// The thread that has issued all operations of the rank so far; [`NONE`] or [`SEVERAL`].
    issuer: AtomicU64,
}

/// The issuer of a rank that has issued no operation.
const NONE: u64 = 0;
/// The issuer of a rank for which several threads have issued.
const SEVERAL: u64 = u64::MAX;

thread_local! {
    /// The number of this thread: from 1, never used again.
    static THREAD: u64 = {
        // The type of std under a model, too: it outlives the world, and orders no memory.
        static THREADS: std_atomic::AtomicU64 = std_atomic::AtomicU64::new(NONE);
        THREADS.fetch_add(1, Ordering::Relaxed) + 1
    };
}

fn this_thread() -> u64 {
    THREAD.with(|thread| *thread)
}

/// While it lives, a thread of the rank does not go on without an operation.
pub(crate) struct Blocked<'a> {
    record: &'a Record,
    thread: u64,
    operation: &'a Arc<SharedOperation>,
}

impl Record {
    pub(crate) fn new(flight: Recorder) -> Self {
        Self { flight, ..Self::default() }
    }

    pub(crate) fn step(&self) -> u64 {
        self.rare.step.load(Ordering::Relaxed)
    }

    pub(crate) fn set_step(&self, step: u64) {
        self.rare.step.store(step, Ordering::Relaxed);
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.rare.epoch.load(Ordering::Acquire)
    }

    /// Leaves `epoch`, which ended with `end`, for the next one, unless another thread of the rank
    /// already did. This is the record of `rank`.
    pub(crate) fn leave_epoch(&self, rank: Rank, epoch: u64, end: Option<Error>) {
        let mut mistakes = self.mistakes.lock();
        if self.epoch() != epoch {
            return;
        }
        mistakes.leave(rank, epoch, end);
        self.rare.is_owed.store(mistakes.is_owed(), Ordering::Release);
        self.rare.epoch.store(epoch + 1, Ordering::Release);
    }

    /// Notes that the rank makes `mistake` in `epoch`. Returns whether the others are to learn of
    /// it: not if the rank has left an epoch because another one had announced the same mistake.
    pub(crate) fn make_mistake(&self, epoch: u64, mistake: Mistake) -> bool {
        let mut mistakes = self.mistakes.lock();
        let is_new = mistakes.make(epoch, mistake);
        self.rare.is_owed.store(mistakes.is_owed(), Ordering::Release);
        is_new
    }

    /// Notes that an operation of `epoch` has taken place with these members.
    pub(crate) fn meet(&self, epoch: u64, members: &[Rank]) {
        if !self.rare.is_owed.load(Ordering::Acquire) {
            return;
        }
        let mut mistakes = self.mistakes.lock();
        mistakes.meet(epoch, members);
        self.rare.is_owed.store(mistakes.is_owed(), Ordering::Release);
    }

    /// Notes the last operation that a rank without shared memory has told. Returns whether it has
    /// gone on to another epoch.
    pub(crate) fn hear(&self, descriptor: &Arc<Descriptor>, step: u64) -> bool {
        self.set_step(step);
        let previous = self.last.lock().replace(Arc::clone(descriptor));
        drop(previous);
        self.rare.epoch.fetch_max(descriptor.epoch, Ordering::AcqRel) < descriptor.epoch
    }

    /// Notes that the rank has announced to send no more in `epoch`. Returns whether that is
    /// possible: a rank announces it for one epoch after the other.
    pub(crate) fn stop(&self, epoch: u64) -> bool {
        let stopped = self.rare.stopped.load(Ordering::Acquire);
        if epoch == stopped {
            self.rare.stopped.store(epoch + 1, Ordering::Release);
        }
        epoch <= stopped
    }

    /// Returns whether the rank has announced that for `epoch`.
    pub(crate) fn has_stopped(&self, epoch: u64) -> bool {
        epoch < self.rare.stopped.load(Ordering::Acquire)
    }

    /// The operation that the rank issued last.
    pub(crate) fn last(&self) -> Option<Arc<Descriptor>> {
        self.last.lock().clone()
    }

    /// Notes that this thread issues an operation for the rank.
    pub(crate) fn enter(&self, descriptor: &Arc<Descriptor>) {
        self.note_issuer(this_thread());
        let previous = self.last.lock().replace(Arc::clone(descriptor));
        drop(previous);
    }

    /// Before the operation is issued: a thread that sees its members arrive sees this, too.
    fn note_issuer(&self, thread: u64) {
        let known = self.rare.issuer.load(Ordering::Relaxed);
        if known == thread || known == SEVERAL {
            return;
        }
        let first =
            self.rare.issuer.compare_exchange(NONE, thread, Ordering::AcqRel, Ordering::Acquire);
        if first.is_err_and(|known| known != thread) {
            self.rare.issuer.store(SEVERAL, Ordering::Release);
        }
    }

    /// Whether one thread has issued all operations of the rank.
    #[cfg(feature = "nccl")]
    pub(crate) fn has_one_issuer(&self) -> bool {
        ![NONE, SEVERAL].contains(&self.rare.issuer.load(Ordering::Acquire))
    }

    pub(crate) fn has_left(&self) -> bool {
        self.rare.left.load(Ordering::Acquire)
    }

    /// Marks the rank as gone; whether it was there until now.
    pub(crate) fn leave(&self) -> bool {
        !self.rare.left.swap(true, Ordering::AcqRel)
    }

    /// Its device waits in a call of NCCL, or goes on.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "the watchdog of NCCL uses it"))]
    pub(crate) fn wait_on_device(&self, wait: Option<MemberWait>) {
        *self.device_wait.lock() = wait;
    }

    /// The call of NCCL in which its device waits.
    pub(crate) fn device_wait(&self) -> Option<MemberWait> {
        self.device_wait.lock().clone()
    }

    /// Notes that a thread of the rank waits for `operation`, or does its work.
    pub(crate) fn block_on<'a>(&'a self, operation: &'a Arc<SharedOperation>) -> Blocked<'a> {
        let thread = this_thread();
        self.blocked_on.lock().push((thread, Arc::clone(operation)));
        Blocked { record: self, thread, operation }
    }

    /// The operations without which its threads do not go on, each with whether this is the only
    /// thread that has issued for the rank. None if it is busy with something else, or hangs there.
    pub(crate) fn blocked_on(&self) -> Vec<(bool, Arc<SharedOperation>)> {
        let issuer = self.rare.issuer.load(Ordering::Acquire);
        let blocked_on = self.blocked_on.lock();
        blocked_on.iter().map(|(thread, it)| (*thread == issuer, Arc::clone(it))).collect()
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        let mut blocked_on = self.record.blocked_on.lock();
        let own = blocked_on.iter().position(|(thread, operation)| {
            *thread == self.thread && Arc::ptr_eq(operation, self.operation)
        });
        // Never the last clone: the thread has one of its own.
        drop(own.map(|own| blocked_on.swap_remove(own)));
    }
}

/// The mistakes that concern a rank.
#[derive(Debug, Default)]
pub(crate) struct Mistakes {
    /// The last mistake that this rank has announced.
    own: Option<OwnMistake>,
    /// Mistakes of other ranks by which this rank has left epochs in earlier calls. It may come to
    /// make them, too.
    owed: Vec<Owed>,
}

/// A mistake of this rank.
#[derive(Debug)]
struct OwnMistake {
    epoch: u64,
    mistake: Mistake,
}

#[derive(Debug)]
struct Owed {
    /// Epoch that this rank has left by the mistake.
    left: u64,
    by: Rank,
    mistake: Mistake,
}

impl Mistakes {
    /// Notes that this rank makes `mistake` in `epoch`. Returns `false` if it has left an epoch by
    /// that: the others have left that epoch too, and go on.
    pub(crate) fn make(&mut self, epoch: u64, mistake: Mistake) -> bool {
        let owed = self.owed.iter().position(|owed| owed.mistake == mistake);
        if let Some(owed) = owed {
            self.owed.remove(owed);
            return false;
        }
        self.own = Some(OwnMistake { epoch, mistake });
        true
    }

    /// Notes that `rank`, this one, leaves `epoch`, which ended with `end`.
    pub(crate) fn leave(&mut self, rank: Rank, epoch: u64, end: Option<Error>) {
        let own = self.own.take().filter(|own| own.epoch == epoch);
        if let Some(Error::StepAborted { rank: by, mistake: Some(mistake), .. }) = end
            && by != rank
            && own.is_none_or(|own| own.mistake != mistake)
        {
            self.owed.push(Owed { left: epoch, by, mistake });
        }
    }

    /// Notes that an operation of `epoch` has taken place with these members: those that had been
    /// ahead of this rank in an earlier epoch were not ahead in this one.
    pub(crate) fn meet(&mut self, epoch: u64, members: &[Rank]) {
        self.owed.retain(|owed| owed.left >= epoch || !members.contains(&owed.by));
    }

    /// Whether this rank may come to make a mistake that another one has announced.
    pub(crate) fn is_owed(&self) -> bool {
        !self.owed.is_empty()
    }
}

/// Whether the world, or an epoch of it, has ended, and how. The first end of each wins.
#[derive(Debug, Default)]
pub(crate) struct EarlyEnds {
    /// Whether `ends` says anything: what each call reads first. Never falls back.
    raised: AtomicBool,
    ends: Mutex<RaisedEnds>,
    /// Rung when the world ends, and when a rank leaves: a rank that a fault holds up sleeps on it.
    changed: Condvar,
}

/// The ends that have been announced.
#[derive(Debug, Default)]
struct RaisedEnds {
    world: Option<Error>,
    /// Ends of epochs. When every rank has left several behind, the last of these stands for all.
    epochs: BTreeMap<u64, Error>,
}

impl RaisedEnds {
    /// The end of an epoch, by which those before it are over, too.
    fn of(&self, epoch: u64) -> Option<&Error> {
        let of_epoch = || self.epochs.range(epoch..).next().map(|(_, end)| end);
        self.world.as_ref().or_else(of_epoch)
    }
}

impl EarlyEnds {
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

    /// Ends the world. Returns the error with which it ended, which is another one if another rank
    /// came first.
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

    /// Sleeps for so long, or until the world ends, or something is `over` for which a thread
    /// [rings](Self::ring). Returns the error that ended the world, if it has ended.
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

    /// Ends `epoch`. Returns the error with which it ended, which is another one if another rank
    /// came first, if every rank has left the epoch behind, or if the world is over: a rank that
    /// hears of that gives its step up, which all others know.
    pub(crate) fn end_epoch(&self, epoch: u64, error: Error) -> Error {
        let mut ends = self.ends.lock();
        if let Some(end) = ends.of(epoch) {
            return end.clone();
        }
        ends.epochs.insert(epoch, error.clone());
        self.raised.store(true, Ordering::Release);
        error
    }

    /// Forgets how the epochs before `epoch` ended, which every rank has left behind, except for
    /// the last.
    pub(crate) fn forget_before(&self, epoch: u64) {
        let mut ends = self.ends.lock();
        ends.epochs = ends.epochs.split_off(&epoch.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hsdp_sharding::Rank;

    const OWN: Rank = Rank::new(0);
    const AHEAD: Rank = Rank::new(12);

    fn begun_wrongly() -> Mistake {
        Mistake::of(&("begin_step", 3))
    }

    fn saved_wrongly() -> Mistake {
        Mistake::of(&("save", 3))
    }

    fn aborted(by: Rank, mistake: Option<Mistake>) -> Option<Error> {
        Some(Error::StepAborted { rank: by, step: 3, reason: "a test".into(), mistake })
    }

    /// Another rank was ahead, and this one left epoch 7 in an earlier call.
    fn left() -> Mistakes {
        let mut mistakes = Mistakes::default();
        mistakes.leave(OWN, 7, aborted(AHEAD, Some(begun_wrongly())));
        mistakes
    }

    #[test]
    fn a_mistake_of_all_ranks_ends_one_epoch() {
        let mut mistakes = left();
        assert!(!mistakes.make(8, begun_wrongly()));
        assert!(mistakes.make(8, begun_wrongly()), "the next one is another mistake");
    }

    #[test]
    fn several_mistakes_of_a_rank_that_is_ahead_end_an_epoch_each() {
        let mut mistakes = left();
        mistakes.leave(OWN, 8, aborted(AHEAD, Some(saved_wrongly())));
        assert!(!mistakes.make(9, begun_wrongly()) && !mistakes.make(9, saved_wrongly()));
        assert!(mistakes.make(9, saved_wrongly()));
    }

    #[test]
    fn a_mistake_that_was_made_in_the_epoch_itself_is_not_owed() {
        let mut mistakes = Mistakes::default();
        assert!(mistakes.make(7, begun_wrongly()));
        mistakes.leave(OWN, 7, aborted(AHEAD, Some(begun_wrongly())));
        assert!(mistakes.make(8, begun_wrongly()));
    }

    #[test]
    fn other_mistakes_and_ends_of_other_kinds_are_announced() {
        assert!(left().make(8, saved_wrongly()));
        for end in [aborted(OWN, Some(begun_wrongly())), aborted(AHEAD, None), None] {
            let mut mistakes = Mistakes::default();
            mistakes.leave(OWN, 7, end);
            assert!(mistakes.make(8, begun_wrongly()));
        }
    }

    #[test]
    fn a_mistake_is_announced_after_an_operation_with_the_rank_that_was_ahead() {
        let mut met = left();
        met.meet(8, &[OWN, AHEAD]);
        assert!(!met.is_owed() && met.make(8, begun_wrongly()));
        for (epoch, members) in [(7, [OWN, AHEAD]), (8, [OWN, Rank::new(1)])] {
            let mut apart = left();
            apart.meet(epoch, &members);
            assert!(apart.is_owed() && !apart.make(8, begun_wrongly()));
        }
    }

    fn ended(reason: &str) -> Error {
        Error::StepAborted { rank: Rank::new(0), step: 3, reason: reason.into(), mistake: None }
    }

    #[test]
    fn a_step_that_is_given_up_because_the_world_is_over_is_no_other_end() {
        let early_ends = EarlyEnds::default();
        let world = early_ends.end_world(ended("stands for the end of a world"));
        assert_eq!(early_ends.end_epoch(0, ended("the world is over")), world);
        assert_eq!(early_ends.check(0), Err(world));
    }
}
