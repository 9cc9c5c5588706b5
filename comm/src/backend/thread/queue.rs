//! The work that waits for a thread, and the threads that wait for work. PROTOCOL.md, "Execution".
//!
//! Work in the queue is shared: the queue holds an `Arc`, and so does each thread that is claiming blocks. The thread that lets go
//! last gets the work out of it (`Arc::into_inner`). At that moment no block is being run (CO-1), and every block is done, unless the
//! operation has failed.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::core::Core;
use super::running::Running;
use crate::engine::{Operation, from_now};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread::{self, Builder, JoinHandle};
use crate::sync::{Condvar, Mutex};

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
    /// Starts the workers when they are first needed; how many there are. Fewer than asked for, or none,
    /// where the system gives no more threads.
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
        // The lock orders this after a worker's look at the queue and before its sleep, or before its look.
        let entries = self.entries.lock();
        (0..workers).for_each(|_| {
            self.changed.notify_one();
        });
        drop(entries);
    }

    /// Work for a member that waits for `own`: that, if it is here, or else the oldest that calls no code of users, which may hang.
    /// Workers do that of other operations: there are some, or nothing is queued.
    pub(super) fn pick(&self, own: &Arc<Operation>) -> Option<Arc<Queued>> {
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

    /// Takes work out of the queue: all its blocks are claimed. The caller holds a clone of its own, so the one that is dropped
    /// here is never the last.
    pub(super) fn remove(&self, queued: &Arc<Queued>) {
        let mut entries = self.entries.lock();
        entries.running.retain(|entry| !Arc::ptr_eq(entry, queued));
        self.length.store(entries.running.len(), Ordering::Release);
    }

    /// Lets the workers finish what is queued, and joins them. One that hangs in a user's code for longer than
    /// `patience` is left behind.
    pub(super) fn close(&self, patience: Duration) {
        let threads = self.crew.lock().replace(Vec::new()).unwrap_or_default();
        // A contribution may own the last handle of the world, and a worker may drop it: it cannot join itself.
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

/// A worker's last word, however it ends.
struct LastWord(Arc<Core>);

impl Drop for LastWord {
    fn drop(&mut self) {
        let queue = &self.0.queue;
        queue.entries.lock().ended += 1;
        queue.changed.notify_all();
    }
}

fn start_worker(core: &Arc<Core>, index: usize) -> io::Result<JoinHandle<()>> {
    let core = Arc::clone(core);
    let work = move || {
        let LastWord(core) = &LastWord(core);
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
/// `Relaxed`: a claim orders nothing. The work was published with the lock of the queue, and is taken back under it.
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
    /// Memory is fetched ahead of a thread that goes on where it was; one that gets each second block is always at a new place.
    /// And few blocks at the end keep all threads busy to it ("guided self-scheduling", Polychronopoulos and Kuck 1987).
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
