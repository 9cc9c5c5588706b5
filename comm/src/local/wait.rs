//! How a member gets its output: it helps while there is work, stays awake for a moment, then sleeps.
//! PROTOCOL.md, "Waiting".

use std::fmt;
use std::hint;
use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::clock::{Alarm, Clock, from_now};
use super::core::Core;
use super::operation::{Erased, Operation};
use super::running::in_block;
use crate::{Descriptor, Error};

/// A member's claim on its output of one operation.
pub(crate) struct Ticket {
    pub(super) core: Arc<Core>,
    pub(super) operation: Arc<Operation>,
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) rank: Rank,
    pub(super) slot: usize,
}

impl Ticket {
    pub(crate) fn is_settled(&self) -> bool {
        self.operation.is_settled()
    }

    pub(crate) fn descriptor(&self) -> &Arc<Descriptor> {
        &self.descriptor
    }

    /// Waits until the operation is settled, by completion, deadline or abort.
    pub(crate) fn wait(self) -> Result<Erased, Error> {
        if in_block() {
            return Err(Error::Reentrant { op: self.descriptor.op, rank: self.rank });
        }
        if !self.is_settled() {
            let Descriptor { op, channel, tag, .. } = &*self.descriptor;
            let unit = tag.unit.map(|unit| unit.get());
            let span = tracing::trace_span!("wait", %op, %channel, unit, step = tag.step, microbatch = tag.microbatch);
            span.in_scope(|| self.await_settled());
        }
        self.operation.take(self.slot)
    }

    fn await_settled(&self) {
        let mut wakefulness = Wakefulness::of(&self.core);
        let mut clock = Clock::start(self.core.options());
        let _blocked = self.core.record(self.rank).block_on(&self.operation);
        while !self.is_settled() {
            match clock.alarm() {
                Alarm::None(left) => self.help_or_rest(&mut wakefulness, left),
                Alarm::Late(late) => self.warn(late),
                // If members came in at the last moment, their work is waited for once more.
                Alarm::Deadline => self.core.end_late(&self.operation, &self.descriptor),
            }
        }
    }

    /// Does some work, stays awake for a moment, or sleeps for at most `rest`.
    fn help_or_rest(&self, wakefulness: &mut Wakefulness, rest: Duration) {
        if let Some(running) = self.core.queue().pick(&self.operation) {
            self.core.help(running, Some(&self.operation));
        } else if !wakefulness.stay_awake() {
            self.operation.park_until(from_now(rest));
        }
    }

    fn warn(&self, late: Duration) {
        let missing =
            self.operation.attendance().map_or(Vec::new(), |attendance| attendance.missing);
        let missing: Vec<u32> = missing.into_iter().map(Rank::get).collect();
        tracing::warn!(rank = self.rank.get(), operation = %self.descriptor, ?missing, waited = ?late, "late");
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("rank", &self.rank)
            .field("descriptor", &self.descriptor)
            .field("settled", &self.is_settled())
            .finish_non_exhaustive()
    }
}

/// How much longer a waiting thread stays awake before it sleeps.
struct Wakefulness {
    moments: u32,
}

impl Wakefulness {
    /// With a core for each rank a wait is worth some microseconds of spinning: a sleeper needs as long to wake.
    /// Otherwise the rank that is waited for may need this very core.
    fn of(core: &Core) -> Self {
        Self { moments: if core.has_a_core_for_each() { 64 } else { 0 } }
    }

    /// Passes a moment awake; `false` when it is time to sleep.
    fn stay_awake(&mut self) -> bool {
        if self.moments == 0 {
            return false;
        }
        self.moments -= 1;
        (0..8).for_each(|_| hint::spin_loop());
        true
    }
}
