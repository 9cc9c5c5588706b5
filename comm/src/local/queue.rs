//! The work that is waiting for a thread, and the threads that wait for work. PROTOCOL.md, "Who does the work".

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::sync::{Arc, OnceLock};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::core::Core;
use super::operation::Operation;
use super::running::Running;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex};

/// Operations with blocks that nobody has claimed, oldest first, and the worker threads.
#[derive(Default)]
pub(super) struct Queue {
    entries: Mutex<Entries>,
    /// The number of entries, so that nobody needs the lock to see that there are none.
    length: AtomicUsize,
    bell: Condvar,
    /// How many workers run, once they were asked for.
    started: OnceLock<usize>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Entries {
    running: VecDeque<Arc<Running>>,
    closed: bool,
    /// Workers that have ended.
    ended: usize,
}

impl Queue {
    /// Starts the workers when they are first needed; how many there are. Fewer than asked for, or none,
    /// where the system gives no more threads.
    pub(super) fn workers(&self, core: &Arc<Core>, wanted: usize) -> usize {
        *self.started.get_or_init(|| {
            let mut threads = self.threads.lock();
            threads.extend((0..wanted).map_while(|index| start_worker(core, index)));
            threads.len()
        })
    }

    pub(super) fn push(&self, running: Arc<Running>) {
        let mut entries = self.entries.lock();
        entries.running.push_back(running);
        self.length.store(entries.running.len(), Ordering::Release);
    }

    /// Wakes up to `workers` workers that sleep.
    pub(super) fn wake(&self, workers: usize) {
        // The lock orders this after a worker's look at the queue and before its sleep, or before its look.
        let entries = self.entries.lock();
        (0..workers).for_each(|_| {
            self.bell.notify_one();
        });
        drop(entries);
    }

    /// Work for a member that waits for `own`: that, if it is here, or else the oldest.
    pub(super) fn pick(&self, own: &Arc<Operation>) -> Option<Arc<Running>> {
        if self.length.load(Ordering::Acquire) == 0 {
            return None;
        }
        let entries = self.entries.lock();
        let mine = entries.running.iter().find(|entry| Arc::ptr_eq(entry.operation(), own));
        mine.or_else(|| entries.running.front()).cloned()
    }

    /// Work for a worker: the oldest. Sleeps while there is none; `None` when the world is gone.
    fn next(&self) -> Option<Arc<Running>> {
        let mut entries = self.entries.lock();
        loop {
            if let Some(oldest) = entries.running.front() {
                return Some(Arc::clone(oldest));
            }
            if entries.closed {
                return None;
            }
            self.bell.wait(&mut entries);
        }
    }

    /// Takes an operation out of the queue: all its blocks are claimed. The caller holds a clone of its own, so the
    /// one that is dropped here is never the last.
    pub(super) fn remove(&self, running: &Arc<Running>) {
        let mut entries = self.entries.lock();
        entries.running.retain(|entry| !Arc::ptr_eq(entry, running));
        self.length.store(entries.running.len(), Ordering::Release);
    }

    /// Lets the workers finish what is queued, and joins them. One that hangs in a user's code for longer than
    /// `patience` is left behind.
    pub(super) fn close(&self, patience: Duration) {
        let threads = mem::take(&mut *self.threads.lock());
        // A deposit may own the last handle of the world, and be dropped by a worker: it cannot join itself.
        let own = thread::current().id();
        let (own, others): (Vec<_>, Vec<_>) =
            threads.into_iter().partition(|thread| thread.thread().id() == own);
        drop(own);
        let until = Instant::now() + patience;
        let mut entries = self.entries.lock();
        entries.closed = true;
        self.bell.notify_all();
        while entries.ended < others.len() {
            if self.bell.wait_until(&mut entries, until).timed_out() {
                tracing::warn!(
                    ?patience,
                    "a worker hangs in the work of an operation, and is left behind"
                );
                return;
            }
        }
        drop(entries);
        for thread in others {
            // A worker catches the panics of blocks; it has no other way to fail.
            let _ = thread.join();
        }
    }

    /// A worker's last word.
    fn end(&self) {
        self.entries.lock().ended += 1;
        self.bell.notify_all();
    }
}

fn start_worker(core: &Arc<Core>, index: usize) -> Option<JoinHandle<()>> {
    let core = Arc::clone(core);
    let work = move || {
        while let Some(running) = core.queue().next() {
            core.help(running, None);
        }
        core.queue().end();
    };
    let started = Builder::new().name(format!("hsdp-worker-{index}")).spawn(work);
    if let Err(error) = &started {
        tracing::warn!(%error, index, "no worker thread: the ranks do the work");
    }
    started.ok()
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = self.length.load(Ordering::Relaxed);
        f.debug_struct("Queue").field("length", &length).finish_non_exhaustive()
    }
}
