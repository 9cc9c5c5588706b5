//! An operation whose members are all there, and its blocks.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use hsdp_sharding::Rank;
use tracing::Span;

use crate::Descriptor;
use crate::engine::{Operation, discard, panic_message};
use crate::execute::{Meter, NextRound, Work};
use crate::sync::thread_local;

thread_local! {
    static IN_BLOCK: Cell<bool> = const { Cell::new(false) };
}

/// For hsdp: whether this thread is in the work of an operation, in which it reads lent gradients. There it can issue no operation, and wait for
/// none ([`Error::Reentrant`](crate::Error::Reentrant)).
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
        let (descriptor, message) = (Arc::clone(descriptor), panic_message(payload));
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
    pub(super) operation: Arc<Operation>,
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) work: Box<dyn AnyWork>,
    pub(super) blocks: usize,
    /// When the outputs are published at the earliest, where the channel is slow.
    pub(super) due: Option<Instant>,
}

impl Running {
    /// Runs a block that was claimed.
    pub(super) fn run(&self, block: usize) -> Result<(), WorkPanic> {
        let (ranks, readers) = (&self.operation.ranks, &self.operation.readers);
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

    /// Every block is done, unless the operation has failed: drops the contributions, and publishes the outputs or begins another
    /// round. Contributions to an operation that has failed are dropped, too.
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
