//! An operation whose members are all there, and its blocks.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use hsdp_sharding::Rank;
use tracing::Span;

use super::any_work::AnyWork;
use super::core::Core;
use super::operation::Operation;
use crate::Descriptor;
use crate::execute::Meter;
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

/// Drops contributions, where no caller can be told that this panicked. The value of the panic is leaked: it might panic again.
pub(super) fn discard<T>(contributions: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(contributions))) {
        let panic = ManuallyDrop::new(panic);
        tracing::warn!(message = %panic_message(&**panic), "a buffer or gradient that a rank had lent panicked when it was dropped");
    }
}

/// The message of a panic, as far as it has one.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> Arc<str> {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("(a panic without a message)").into()
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

/// An operation whose members have all arrived, and its work.
pub(super) struct Running {
    operation: Arc<Operation>,
    descriptor: Arc<Descriptor>,
    work: Box<dyn AnyWork>,
    blocks: usize,
    /// When the outputs are published at the earliest, where the channel is slow.
    due: Option<Instant>,
}

impl Running {
    /// The outputs are published at `due`, if they are there before.
    pub(super) fn new(
        operation: Arc<Operation>,
        descriptor: Arc<Descriptor>,
        work: Box<dyn AnyWork>,
        due: Option<Instant>,
    ) -> Self {
        let blocks = work.blocks();
        Self { operation, descriptor, work, blocks, due }
    }

    pub(super) fn operation(&self) -> &Arc<Operation> {
        &self.operation
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The bytes that are moved: they decide which threads do the work.
    pub(super) fn bytes(&self) -> usize {
        self.work.bytes()
    }

    /// Whether a block may call code of a user, which may hang: then fewer threads may help.
    pub(super) fn calls_users(&self) -> bool {
        self.work.calls_users()
    }

    /// Runs a block that was claimed.
    pub(super) fn run(&self, block: usize, core: &Core) -> Result<(), WorkPanic> {
        let (ranks, readers) = (self.operation.ranks(), self.operation.readers());
        let meter = Meter::new(core.records(), ranks, &self.descriptor, readers);
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

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("operation", &self.operation).finish_non_exhaustive()
    }
}
