//! An operation whose members are all there: its blocks, and the threads that claim them.
//!
//! The life of the work is the life of an `Arc`: the queue holds a clone, and so does each thread that is
//! claiming blocks. Whoever lets go last has the work to itself, and so knows that every block is done (CO-1).

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use hsdp_sharding::Rank;
use tracing::Span;

use super::core::Core;
use super::operation::{Erased, Operation};
use crate::Descriptor;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::work::{Meter, Work};

thread_local! {
    static IN_BLOCK: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is running a block, so that what is called from a block can be refused.
pub(crate) fn in_block() -> bool {
    IN_BLOCK.get()
}

/// The message of a panic, as far as it has one.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> Arc<str> {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("(a panic without a message)").into()
}

/// A panic in a block, and the member whose deposit was being read.
pub(super) struct BlockPanic {
    pub(super) rank: Rank,
    pub(super) message: Arc<str>,
}

/// An operation whose members are all there.
pub(super) struct Running {
    operation: Arc<Operation>,
    descriptor: Arc<Descriptor>,
    work: Box<dyn AnyWork>,
    blocks: usize,
    next: AtomicUsize,
}

impl Running {
    pub(super) fn new<W: Work + 'static>(
        operation: Arc<Operation>,
        descriptor: Arc<Descriptor>,
        work: W,
    ) -> Self {
        let blocks = work.blocks();
        Self { operation, descriptor, work: Box::new(work), blocks, next: AtomicUsize::new(0) }
    }

    pub(super) fn operation(&self) -> &Arc<Operation> {
        &self.operation
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes that the work writes in all: what decides who does it.
    pub(super) fn bytes(&self) -> usize {
        self.work.bytes()
    }

    /// The next block that nobody has claimed.
    ///
    /// `Relaxed`: a claim orders nothing. The work was published with the lock of the queue, and is taken back by
    /// the last `Arc`.
    pub(super) fn claim(&self) -> Option<usize> {
        let block = self.next.fetch_add(1, Ordering::Relaxed);
        (block < self.blocks).then_some(block)
    }

    /// Leaves nothing to be claimed.
    pub(super) fn abandon(&self) {
        self.next.store(self.blocks, Ordering::Relaxed);
    }

    /// Runs a block that was claimed.
    pub(super) fn run(&self, block: usize, core: &Core) -> Result<(), BlockPanic> {
        let ranks = self.operation.ranks();
        let Descriptor { channel, op, .. } = *self.descriptor;
        let meter = Meter::new(core.records(), ranks, channel, op);
        IN_BLOCK.set(true);
        let ran = catch_unwind(AssertUnwindSafe(|| self.work.run(block, &meter)));
        IN_BLOCK.set(false);
        ran.map_err(|panic| BlockPanic {
            rank: ranks[meter.reading().unwrap_or(0)],
            message: panic_message(&*panic),
        })
    }

    /// Every block is done: drops what the members lent, and publishes their outputs. Nothing is left to
    /// publish if the operation has failed meanwhile.
    pub(super) fn complete(self) -> Result<(), BlockPanic> {
        let Self { operation, work, .. } = self;
        if operation.is_settled() {
            return Ok(());
        }
        let outputs = catch_unwind(AssertUnwindSafe(|| work.finish()));
        let outputs = outputs.map_err(|panic| BlockPanic {
            rank: operation.ranks()[0],
            message: panic_message(&*panic),
        })?;
        operation.succeed(outputs);
        Ok(())
    }

    pub(super) fn span(&self) -> Span {
        let Descriptor { op, channel, tag, .. } = &*self.descriptor;
        let unit = tag.unit.map(|unit| unit.get());
        tracing::trace_span!("blocks", %op, %channel, unit, step = tag.step, microbatch = tag.microbatch)
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("operation", &self.operation).finish_non_exhaustive()
    }
}

/// [`Work`] with the type of its outputs erased.
trait AnyWork: Send + Sync {
    fn bytes(&self) -> usize;
    fn run(&self, block: usize, meter: &Meter<'_>);
    fn finish(self: Box<Self>) -> Vec<Erased>;
}

impl<W: Work> AnyWork for W {
    fn bytes(&self) -> usize {
        Work::bytes(self)
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        Work::run(self, block, meter);
    }

    fn finish(self: Box<Self>) -> Vec<Erased> {
        Work::finish(*self).into_iter().map(|output| Box::new(output) as Erased).collect()
    }
}
