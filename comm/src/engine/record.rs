//! The state that a rank shows to the others: its step, its waits, its bytes.

use std::sync::Arc;
use std::sync::atomic as std_atomic;

use crossbeam::utils::CachePadded;
use hsdp_flight::Recorder;
use hsdp_sharding::Rank;

use super::mistakes::Mistakes;
use super::operation::Operation;
use crate::engine::judge::MemberWait;
use crate::ledger::Ledger;
use crate::rolling::Rolling;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, thread_local};
use crate::{Descriptor, Error, Mistake};

/// The public state of one rank. The rank writes it; threads that name the rank in an error read it.
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
    blocked_on: Mutex<Vec<(u64, Arc<Operation>)>>,
}

/// Fields that are read with each operation and rarely written: apart in memory from those that each operation writes.
#[derive(Debug, Default)]
struct RareFields {
    step: AtomicU64,
    epoch: AtomicU64,
    left: AtomicBool,
    /// Whether `mistakes` has some that the rank may come to make: each operation looks here first.
    is_owed: AtomicBool,
    /// How many epochs it has said to bring nothing more to: of a rank that shares no memory with this one.
    stopped: AtomicU64,
    /// The thread that has issued all operations of the rank so far; [`NONE`] or [`SEVERAL`].
    issuer: AtomicU64,
}

/// Nothing was issued.
const NONE: u64 = 0;
/// More than one thread has issued.
const SEVERAL: u64 = u64::MAX;

thread_local! {
    /// The number of this thread: from 1, never used again.
    static THREAD: u64 = {
        // Of std under a model, too: it outlives the world, and orders nothing.
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
    operation: &'a Arc<Operation>,
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

    /// Notes the last operation that a rank without shared memory has told. Returns whether it has gone on to another epoch.
    pub(crate) fn hear(&self, descriptor: &Arc<Descriptor>, step: u64) -> bool {
        self.set_step(step);
        let previous = self.last.lock().replace(Arc::clone(descriptor));
        drop(previous);
        self.rare.epoch.fetch_max(descriptor.epoch, Ordering::AcqRel) < descriptor.epoch
    }

    /// It has said that it brings nothing more to `epoch`; whether that can be: it says so of one after the other.
    pub(crate) fn stop(&self, epoch: u64) -> bool {
        let stopped = self.rare.stopped.load(Ordering::Acquire);
        if epoch == stopped {
            self.rare.stopped.store(epoch + 1, Ordering::Release);
        }
        epoch <= stopped
    }

    /// Whether it has said so.
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
    pub(crate) fn block_on<'a>(&'a self, operation: &'a Arc<Operation>) -> Blocked<'a> {
        let thread = this_thread();
        self.blocked_on.lock().push((thread, Arc::clone(operation)));
        Blocked { record: self, thread, operation }
    }

    /// The operations without which its threads do not go on, each with whether this is the only thread that has issued for the rank. None if
    /// it is busy with something else, or hangs there.
    pub(crate) fn blocked_on(&self) -> Vec<(bool, Arc<Operation>)> {
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
