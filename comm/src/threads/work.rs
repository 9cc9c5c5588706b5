//! The work of an operation whose members are all there: its blocks, the queue in which it waits
//! for threads, and the steps of threads that do it. PROTOCOL.md, "Execution".
//!
//! Work in the queue is shared: the queue holds an `Arc`, and so does each thread that claims
//! blocks. The thread that drops its `Arc` last gets the work out of it (`Arc::into_inner`). At
//! that moment no block is being run (CO-1), and every block is done, unless the operation has
//! failed.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use tracing::Span;

use super::core::Core;
use crate::Descriptor;
use crate::engine::{SharedOperation, discard, from_now, panic_message};
use crate::execute::{Meter, NextRound, Work};
use crate::options::Workers;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread::{self, Builder, JoinHandle};
use crate::sync::{Condvar, Mutex, thread_local};

thread_local! {
    static IN_BLOCK: Cell<bool> = const { Cell::new(false) };
}

/// For hsdp: whether this thread is in the work of an operation, in which it reads lent gradients.
/// There it can issue no operation, and wait for none
/// ([`CallError::Reentrant`](crate::CallError)).
#[doc(hidden)]
#[must_use]
pub fn in_work() -> bool {
    IN_BLOCK.with(Cell::get)
}

/// While it lives, this thread is running a block.
pub(crate) struct InBlock {
    outer: bool,
}

impl InBlock {
    pub(crate) fn enter() -> Self {
        Self { outer: IN_BLOCK.with(|it| it.replace(true)) }
    }
}

impl Drop for InBlock {
    fn drop(&mut self) {
        IN_BLOCK.with(|it| it.set(self.outer));
    }
}

/// A panic in the work of an operation.
pub(super) struct WorkPanic {
    pub(super) descriptor: Arc<Descriptor>,
    /// The member whose contribution was being read, if one was.
    pub(super) rank: Option<Rank>,
    pub(super) message: Arc<str>,
}

impl WorkPanic {
    /// A panic for which no member is known.
    pub(super) fn of_no_member(descriptor: &Arc<Descriptor>, payload: &(dyn Any + Send)) -> Self {
        let descriptor = Arc::clone(descriptor);
        let message = panic_message(payload);
        Self { descriptor, rank: None, message }
    }
}

/// [`Work`] with the type of its outputs erased.
pub(crate) trait AnyWork: Send + Sync {
    fn bytes(&self) -> usize;
    fn calls_users(&self) -> bool;
    fn run(&self, block: usize, meter: &Meter<'_>);
    fn next_round(&mut self) -> Option<NextRound>;
    /// Returns the [`Outputs`](crate::engine::Outputs) of the work.
    fn finish(self: Box<Self>) -> Box<dyn Any + Send>;
}

impl<W: Work> AnyWork for W {
    fn bytes(&self) -> usize {
        Work::bytes(self)
    }

    fn calls_users(&self) -> bool {
        Work::calls_users(self)
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        Work::run(self, block, meter);
    }

    fn next_round(&mut self) -> Option<NextRound> {
        Work::next_round(self)
    }

    fn finish(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(Work::finish(*self))
    }
}

/// An operation whose members have all arrived, and its work.
pub(super) struct Running {
    pub(super) operation: Arc<SharedOperation>,
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) work: Box<dyn AnyWork>,
    pub(super) blocks: usize,
    /// When the outputs are published at the earliest, where the channel is slow.
    pub(super) due: Option<Instant>,
}

impl Running {
    /// Runs a block that was claimed.
    pub(super) fn run(&self, block: usize) -> Result<(), WorkPanic> {
        let ranks = &self.operation.ranks;
        let readers = &self.operation.readers;
        let meter = Meter::new(ranks, readers);
        let in_block = InBlock::enter();
        let ran = catch_unwind(AssertUnwindSafe(|| self.work.run(block, &meter)));
        drop(in_block);
        ran.map_err(|panic| WorkPanic {
            descriptor: Arc::clone(&self.descriptor),
            rank: meter.reading().map(|slot| ranks[slot]),
            message: panic_message(&*panic),
        })
    }

    /// Every block is done, unless the operation has failed: drops the contributions, and publishes
    /// the outputs or begins another round. Contributions to an operation that has failed are
    /// dropped, too.
    pub(super) fn complete(self) -> Result<(), WorkPanic> {
        let Self { operation, descriptor, mut work, due, .. } = self;
        if operation.is_settled() {
            discard(work);
            return Ok(());
        }
        let finished = catch_unwind(AssertUnwindSafe(|| match work.next_round() {
            Some(begin) => {
                drop(work);
                begin(&operation);
            }
            None => operation.succeed(work.finish(), due),
        }));
        finished.map_err(|panic| WorkPanic::of_no_member(&descriptor, &*panic))
    }

    pub(super) fn span(&self) -> Span {
        let Descriptor { op, channel, tag, .. } = &*self.descriptor;
        let unit = tag.unit.map(|unit| unit.get());
        tracing::trace_span!("blocks", %op, %channel, unit, step = tag.step, microbatch = tag.microbatch)
    }
}

/// Operations with blocks that are not claimed, oldest first, and the worker threads.
#[derive(Default)]
pub(super) struct Queue {
    entries: Mutex<QueuedWork>,
    /// The number of entries: to see that there are none needs no lock.
    length: AtomicUsize,
    changed: Condvar,
    /// The worker threads, once they were asked for.
    crew: Mutex<Option<Vec<JoinHandle<()>>>>,
}

#[derive(Default)]
struct QueuedWork {
    running: VecDeque<Arc<Queued>>,
    closed: bool,
    /// Workers that have ended.
    ended: usize,
}

impl Queue {
    /// Starts the workers when they are first needed; how many there are. Fewer than asked for, or
    /// none, where the system gives no more threads.
    pub(super) fn workers(&self, core: &Arc<Core>, wanted: usize) -> usize {
        let mut crew = self.crew.lock();
        if let Some(threads) = &*crew {
            return threads.len();
        }
        let started = (0..wanted).map(|index| start_worker(core, index));
        let mut refused = None;
        let threads = started.map_while(|thread| thread.map_err(|it| refused = Some(it)).ok());
        let threads: Vec<_> = threads.collect();
        let size = threads.len();
        *crew = Some(threads);
        // A subscriber to warnings may do what it likes: it is called without the lock.
        drop(crew);
        if let Some(error) = refused {
            hsdp_warnings::warn!(%error, wanted, size, "some worker threads could not be started: the ranks do their work");
        }
        size
    }

    /// Puts work into the queue; the caller is the first thread that holds it.
    pub(super) fn push(&self, queued: &Arc<Queued>) {
        let mut entries = self.entries.lock();
        entries.running.push_back(Arc::clone(queued));
        self.length.store(entries.running.len(), Ordering::Release);
    }

    /// Wakes up to `workers` workers that sleep.
    pub(super) fn wake(&self, workers: usize) {
        // The lock orders this after a worker's look at the queue and before its sleep, or before
        // its look.
        let entries = self.entries.lock();
        (0..workers).for_each(|_| {
            self.changed.notify_one();
        });
        drop(entries);
    }

    /// Work for a member that waits for `own`: that, if it is here, or else the oldest that calls
    /// no code of users, which may hang. Workers do that of other operations: there are some, or
    /// nothing is queued.
    pub(super) fn pick(&self, own: &Arc<SharedOperation>) -> Option<Arc<Queued>> {
        if self.length.load(Ordering::Acquire) == 0 {
            return None;
        }
        let entries = self.entries.lock();
        let mine = entries.running.iter().find(|entry| Arc::ptr_eq(&entry.running.operation, own));
        mine.or_else(|| entries.running.iter().find(|entry| !entry.running.work.calls_users()))
            .cloned()
    }

    /// Work for a worker: the oldest. Sleeps while there is none; `None` when the world is gone.
    fn next(&self) -> Option<Arc<Queued>> {
        let mut entries = self.entries.lock();
        loop {
            if let Some(oldest) = entries.running.front() {
                return Some(Arc::clone(oldest));
            }
            if entries.closed {
                return None;
            }
            self.changed.wait(&mut entries);
        }
    }

    /// Returns the work of an operation, if it is in the queue.
    fn queued(&self, operation: &Arc<SharedOperation>) -> Option<Arc<Queued>> {
        let entries = self.entries.lock();
        let mut running = entries.running.iter();
        running.find(|entry| Arc::ptr_eq(&entry.running.operation, operation)).cloned()
    }

    /// Takes work out of the queue: all its blocks are claimed. The caller holds a clone of its
    /// own, so the one that is dropped here is never the last.
    pub(super) fn remove(&self, queued: &Arc<Queued>) {
        let mut entries = self.entries.lock();
        entries.running.retain(|entry| !Arc::ptr_eq(entry, queued));
        self.length.store(entries.running.len(), Ordering::Release);
    }

    /// Lets the workers finish what is queued, and joins them. One that hangs in a user's code for
    /// longer than `patience` is left behind.
    pub(super) fn close(&self, patience: Duration) {
        let threads = self.crew.lock().replace(Vec::new()).unwrap_or_default();
        // A contribution may own the last handle of the world, and a worker may drop it: it cannot
        // join itself.
        let own = thread::current().id();
        let (own, others): (Vec<_>, Vec<_>) =
            threads.into_iter().partition(|thread| thread.thread().id() == own);
        drop(own);
        if !self.all_end(others.len(), patience) {
            hsdp_warnings::warn!(
                ?patience,
                "a worker thread hangs in the work of an operation, and is abandoned"
            );
            return;
        }
        for thread in others {
            // A worker catches the panics of blocks; it has no other way to fail.
            let _ = thread.join();
        }
    }

    /// Whether `workers` workers end, when they are told to, before `patience` is over.
    fn all_end(&self, workers: usize, patience: Duration) -> bool {
        let until = from_now(patience);
        let mut entries = self.entries.lock();
        entries.closed = true;
        self.changed.notify_all();
        while entries.ended < workers {
            if self.changed.wait_until(&mut entries, until).timed_out() {
                break;
            }
        }
        entries.ended >= workers
    }
}

/// A guard that counts the end of a worker, however it ends.
struct WorkerEnd(Arc<Core>);

impl Drop for WorkerEnd {
    fn drop(&mut self) {
        let queue = &self.0.queue;
        queue.entries.lock().ended += 1;
        queue.changed.notify_all();
    }
}

fn start_worker(core: &Arc<Core>, index: usize) -> io::Result<JoinHandle<()>> {
    let core = Arc::clone(core);
    let work = move || {
        let WorkerEnd(core) = &WorkerEnd(core);
        while let Some(queued) = core.queue.next() {
            core.help(queued, None);
        }
    };
    Builder::new().name(format!("hsdp-worker-{index}")).spawn(work)
}

/// Work in the queue.
pub(super) struct Queued {
    pub(super) running: Running,
    pub(super) unclaimed: Unclaimed,
}

impl Queued {
    /// Work of which no block is claimed, for so many threads.
    pub(super) fn new(running: Running, threads: usize) -> Self {
        let unclaimed = Unclaimed::new(running.blocks, threads);
        Self { running, unclaimed }
    }
}

/// A claim takes the blocks that are left, divided by so many times the threads.
const CLAIMS_OF_A_THREAD: usize = 4;

/// The blocks that are not claimed.
///
/// `Relaxed`: a claim orders nothing. The work was published with the lock of the queue, and is
/// taken back under it.
pub(super) struct Unclaimed {
    next: AtomicUsize,
    blocks: usize,
    parts: usize,
}

impl Unclaimed {
    fn new(blocks: usize, threads: usize) -> Self {
        Self { next: AtomicUsize::new(0), blocks, parts: CLAIMS_OF_A_THREAD * threads.max(1) }
    }

    /// The next blocks that are not claimed: many neighbours first, and fewer towards the end.
    ///
    /// Memory is fetched ahead of a thread that goes on where it was; one that gets each second
    /// block is always at a new place. And few blocks at the end keep all threads busy to it
    /// ("guided self-scheduling", Polychronopoulos and Kuck 1987).
    pub(super) fn claim(&self) -> Option<Range<usize>> {
        let end = |first: usize| first + (self.blocks - first).div_ceil(self.parts);
        let after = |first: usize| (first < self.blocks).then(|| end(first));
        let first = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).ok()?;
        Some(first..end(first))
    }

    /// Leaves nothing to be claimed.
    pub(super) fn abandon(&self) {
        self.next.store(self.blocks, Ordering::Relaxed);
    }
}

/// Work that moves no more than this is done by the member that arrives last, before its call
/// returns: waking others would take longer.
const INLINE_BYTES: usize = 32 << 10;

impl Core {
    /// Has the work done: here, by `rank`, if it is small or no other thread would do it; otherwise
    /// by the threads that are free.
    pub(super) fn launch(self: &Arc<Self>, running: Running, rank: Rank) {
        // The last to arrive may be the progress engine, for whom others wait: it does no more than
        // it must.
        let is_alone = self.endpoint().is_some();
        let small = (running.blocks <= 1 && !is_alone) || running.work.bytes() <= INLINE_BYTES;
        let workers = if small { 0 } else { self.queue.workers(self, self.wanted_workers()) };
        if small || (workers == 0 && !self.has_helpers(&running.operation)) {
            return self.run_here(running, rank);
        }
        // Members that wait help, too.
        let threads = self.cores.min(workers + self.state.records.len());
        let useful = running.blocks.min(threads);
        let queued = Arc::new(Queued::new(running, threads));
        self.queue.push(&queued);
        // Members that sleep for this very operation come first: they are of no other use.
        let helpers = queued.running.operation.wake_helpers(useful);
        if workers + helpers == 0 {
            // A member that slept is about to look again, or has just looked.
            return self.help_for(queued, rank);
        }
        self.queue.wake(workers.min(useful - helpers));
        self.let_go(queued);
    }

    /// Runs blocks of `queued` for `rank`, which does not wait for it.
    fn help_for(&self, queued: Arc<Queued>, rank: Rank) {
        let operation = Arc::clone(&queued.running.operation);
        let _blocked =
            queued.running.work.calls_users().then(|| self.state.record(rank).block_on(&operation));
        self.help(queued, None);
    }

    /// Whether there is a core that no rank uses, and a member that sleeps for this very operation.
    fn has_helpers(&self, operation: &SharedOperation) -> bool {
        let awake = self.state.records.len() - self.sleepers.load(Ordering::Relaxed);
        awake < self.cores && operation.has_sleepers()
    }

    /// Has a member sleep until its operation changes, or `moment` comes.
    pub(super) fn sleep_on(&self, operation: &SharedOperation, moment: Instant) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        operation.sleep_until(moment);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The number of worker threads. Between threads, ranks that outnumber the cores keep these
    /// busy: a worker would take one away from a rank that computes.
    fn wanted_workers(&self) -> usize {
        // Where the other ranks are processes, they have workers of their own.
        match (self.state.options.workers, self.endpoint()) {
            (Workers::Auto, Some(_)) => 1,
            (Workers::Auto, None) if self.has_a_core_for_each() => self.state.records.len(),
            (Workers::Auto, None) => 0,
            (Workers::Count(count), _) => count,
        }
    }

    /// The exception to waits that end: code of users that is called here may keep `rank` for ever.
    /// Its record names the operation, so that others can find the owner of the code.
    fn run_here(&self, running: Running, rank: Rank) {
        let operation = Arc::clone(&running.operation);
        let _blocked =
            running.work.calls_users().then(|| self.state.record(rank).block_on(&operation));
        let span = running.span();
        let _entered = span.enter();
        let ran = (0..running.blocks).try_for_each(|block| running.run(block));
        let completed = match ran {
            Ok(()) => running.complete(),
            Err(panic) => {
                discard(running);
                Err(panic)
            }
        };
        if let Err(panic) = completed {
            self.end_panicked(&operation, panic);
        }
    }

    /// Runs blocks of `queued` until none is left to claim, or `own` is settled.
    pub(super) fn help(&self, queued: Arc<Queued>, own: Option<&SharedOperation>) {
        let running = &queued.running;
        let span = running.span();
        let _entered = span.enter();
        while !own.is_some_and(SharedOperation::is_settled) {
            let Some(blocks) = queued.unclaimed.claim() else {
                self.queue.remove(&queued);
                break;
            };
            // Claimed blocks are run, unless the operation has failed: no member would get anything
            // of it.
            let mut blocks = blocks.take_while(|_| !running.operation.is_settled());
            if let Err(panic) = blocks.try_for_each(|block| running.run(block)) {
                queued.unclaimed.abandon();
                self.end_panicked(&running.operation, panic);
            }
        }
        self.let_go(queued);
    }

    /// Takes the work of an operation that has failed out of the queue, if it is there. It holds
    /// the buffers that members have lent, and the thread that was woken for it may not look again.
    pub(super) fn abandon(&self, failed: &Arc<SharedOperation>) {
        if let Some(queued) = self.queue.queued(failed) {
            queued.unclaimed.abandon();
            self.queue.remove(&queued);
            self.let_go(queued);
        }
    }

    /// Lets go of work; the thread that does so last completes it.
    fn let_go(&self, queued: Arc<Queued>) {
        let Some(Queued { running, .. }) = Arc::into_inner(queued) else { return };
        let operation = Arc::clone(&running.operation);
        if let Err(panic) = running.complete() {
            self.end_panicked(&operation, panic);
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::Unclaimed;

    fn lengths(unclaimed: &Unclaimed) -> Vec<usize> {
        let mut next = 0;
        let mut lengths = Vec::new();
        while let Some(claimed) = unclaimed.claim() {
            assert_eq!(claimed.start, next, "after {lengths:?}");
            next = claimed.end;
            lengths.push(claimed.len());
        }
        lengths
    }

    #[test]
    fn claims_cover_all_blocks_once() {
        for (blocks, threads) in (0..130).flat_map(|blocks| (0..9).map(move |it| (blocks, it))) {
            let lengths = lengths(&Unclaimed::new(blocks, threads));
            assert_eq!(lengths.iter().sum::<usize>(), blocks, "{threads} threads");
            assert!(lengths.iter().all(|length| *length > 0));
            assert!(lengths.is_sorted_by(|one, next| one >= next), "{lengths:?}");
        }
    }

    #[test]
    fn claims_are_long_first_and_single_at_the_end() {
        let lengths = lengths(&Unclaimed::new(64, 2));
        assert_eq!(lengths[..6], [8, 7, 7, 6, 5, 4]);
        assert_eq!(lengths.last(), Some(&1));
    }

    #[test]
    fn nothing_is_claimed_of_what_was_abandoned() {
        let unclaimed = Unclaimed::new(64, 2);
        assert_eq!(unclaimed.claim(), Some(0..8));
        unclaimed.abandon();
        assert_eq!(unclaimed.claim(), None);
    }
}
