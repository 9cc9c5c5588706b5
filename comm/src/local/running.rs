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

use super::core::Core;
use super::operation::Operation;
use super::slots::AnySlots;
use crate::Descriptor;
use crate::sync::thread_local;
use crate::work::Meter;

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

/// Drops what a user deposited, where nobody can be told that this panicked. What it panicked with is leaked: it
/// might panic again.
pub(super) fn discard<T>(deposited: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(deposited))) {
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
    /// The member whose deposit was being read, if one was.
    pub(super) rank: Option<Rank>,
    pub(super) message: Arc<str>,
}

impl WorkPanic {
    /// A panic that is no member's doing, as far as is known.
    pub(super) fn of_nobody(descriptor: &Arc<Descriptor>, payload: &(dyn Any + Send)) -> Self {
        let (descriptor, message) = (Arc::clone(descriptor), panic_message(payload));
        Self { descriptor, rank: None, message }
    }
}

/// An operation whose members are all there.
pub(super) struct Running {
    operation: Arc<Operation>,
    descriptor: Arc<Descriptor>,
    /// With the work, until it is complete.
    slots: Option<Box<dyn AnySlots>>,
    blocks: usize,
    /// When the outputs are published at the earliest, where the channel is slow.
    due: Option<Instant>,
}

impl Running {
    pub(super) fn new(
        operation: Arc<Operation>,
        descriptor: Arc<Descriptor>,
        slots: Box<dyn AnySlots>,
    ) -> Self {
        let blocks = slots.blocks();
        Self { operation, descriptor, slots: Some(slots), blocks, due: None }
    }

    /// Publishes the outputs at `due`, if they are there before.
    pub(super) fn due(mut self, due: Option<Instant>) -> Self {
        self.due = due;
        self
    }

    fn slots(&self) -> &dyn AnySlots {
        self.slots.as_deref().expect("the work is there until it is complete")
    }

    pub(super) fn operation(&self) -> &Arc<Operation> {
        &self.operation
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// How much work there is, in bytes that are moved: what decides who does it.
    pub(super) fn bytes(&self) -> usize {
        self.slots().bytes()
    }

    /// Whether a block may call code of a user, which may hang: what decides who may help.
    pub(super) fn calls_users(&self) -> bool {
        self.slots().calls_users()
    }

    /// Runs a block that was claimed.
    pub(super) fn run(&self, block: usize, core: &Core) -> Result<(), WorkPanic> {
        let (ranks, readers) = (self.operation.ranks(), self.operation.readers());
        let meter = Meter::new(core.records(), ranks, &self.descriptor, readers);
        let in_block = InBlock::enter();
        let ran = catch_unwind(AssertUnwindSafe(|| self.slots().run(block, &meter)));
        drop(in_block);
        ran.map_err(|panic| WorkPanic {
            descriptor: Arc::clone(&self.descriptor),
            rank: meter.reading().map(|slot| ranks[slot]),
            message: panic_message(&*panic),
        })
    }

    /// Every block is done, unless the operation has failed: drops what the members lent, and publishes their outputs. Nothing is left to
    /// publish if the operation has failed meanwhile.
    pub(super) fn complete(mut self) -> Result<(), WorkPanic> {
        if self.operation.is_settled() {
            return Ok(());
        }
        let Some(slots) = &mut self.slots else { return Ok(()) };
        let finished = catch_unwind(AssertUnwindSafe(|| slots.finish()));
        let again = finished.map_err(|panic| WorkPanic::of_nobody(&self.descriptor, &*panic))?;
        match (self.slots.take(), again) {
            (Some(slots), Some(again)) => again.again(&self.operation, slots),
            (Some(slots), None) => self.operation.succeed(slots, self.due),
            (None, _) => {}
        }
        Ok(())
    }

    pub(super) fn span(&self) -> Span {
        let Descriptor { op, channel, tag, .. } = &*self.descriptor;
        let unit = tag.unit.map(|unit| unit.get());
        tracing::trace_span!("blocks", %op, %channel, unit, step = tag.step, microbatch = tag.microbatch)
    }
}

/// Work that failed: what was lent is dropped by whoever lets go last, which may be a worker.
impl Drop for Running {
    fn drop(&mut self) {
        discard(self.slots.take());
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("operation", &self.operation).finish_non_exhaustive()
    }
}
