//! The threads that do the work of an operation. PROTOCOL.md, "Execution".

use std::sync::Arc;
use std::time::Instant;

use hsdp_sharding::Rank;

use super::core::Core;
use super::queue::Queued;
use super::running::Running;
use crate::engine::{Operation, discard};
use crate::options::Workers;
use crate::sync::atomic::Ordering;

/// Work that moves no more than this is done by the member that arrives last, before its call returns: waking
/// others would take longer.
const INLINE_BYTES: usize = 32 << 10;

impl Core {
    /// Has the work done: here, by `rank`, if it is small or no other thread would do it; otherwise by the threads that are free.
    pub(super) fn launch(self: &Arc<Self>, running: Running, rank: Rank) {
        // The last to arrive may be the progress engine, for whom others wait: it does no more than it must.
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
    fn has_helpers(&self, operation: &Operation) -> bool {
        let awake = self.state.records.len() - self.sleepers.load(Ordering::Relaxed);
        awake < self.cores && operation.has_sleepers()
    }

    /// Has a member sleep until its operation changes, or `moment` comes.
    pub(super) fn sleep_on(&self, operation: &Operation, moment: Instant) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        operation.sleep_until(moment);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The number of worker threads. Between threads, ranks that outnumber the cores keep these busy: a worker would take one
    /// away from a rank that computes.
    fn wanted_workers(&self) -> usize {
        // Where the other ranks are processes, they have workers of their own.
        match (self.state.options.workers, self.endpoint()) {
            (Workers::Auto, Some(_)) => 1,
            (Workers::Auto, None) if self.has_a_core_for_each() => self.state.records.len(),
            (Workers::Auto, None) => 0,
            (Workers::Count(count), _) => count,
        }
    }

    /// The exception to waits that end: code of users that is called here may keep `rank` for ever. Its record names the operation,
    /// so that others can find the owner of the code.
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
    pub(super) fn help(&self, queued: Arc<Queued>, own: Option<&Operation>) {
        let running = &queued.running;
        let span = running.span();
        let _entered = span.enter();
        while !own.is_some_and(Operation::is_settled) {
            let Some(blocks) = queued.unclaimed.claim() else {
                self.queue.remove(&queued);
                break;
            };
            // Claimed blocks are run, unless the operation has failed: no member would get anything of it.
            let mut blocks = blocks.take_while(|_| !running.operation.is_settled());
            if let Err(panic) = blocks.try_for_each(|block| running.run(block)) {
                queued.unclaimed.abandon();
                self.end_panicked(&running.operation, panic);
            }
        }
        self.let_go(queued);
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
