//! A member waits for its output: it helps while there is work, stays awake for a moment, then
//! sleeps. PROTOCOL.md, "Waiting".

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::core::{Core, MemberCall, OwnRank};
use super::work::in_work;
use crate::engine::judge::WaitKey;
use crate::engine::{Alarm, SharedOperation, WaitClock, from_now};
use crate::remote::Urgency;
use crate::sync::{hint, thread};
use crate::{CallError, Descriptor, Error};
use hsdp_flight::EntryNumber;

/// A member's claim on its output of one operation.
pub(crate) struct Ticket {
    own: Arc<OwnRank>,
    operation: Arc<SharedOperation>,
    descriptor: Arc<Descriptor>,
    slot: usize,
    entry: EntryNumber,
}

impl Ticket {
    pub(super) fn new(
        member: MemberCall<'_>,
        operation: Arc<SharedOperation>,
        descriptor: Arc<Descriptor>,
    ) -> Self {
        let MemberCall { own, site, entry } = member;
        Self { own: Arc::clone(own), operation, descriptor, slot: site.slot, entry }
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.operation.is_settled()
    }

    pub(crate) fn operation(&self) -> &Arc<SharedOperation> {
        &self.operation
    }

    pub(crate) fn descriptor(&self) -> &Arc<Descriptor> {
        &self.descriptor
    }

    /// Waits until the operation is settled, by completion, deadline or abort.
    pub(crate) fn wait<O: 'static>(self) -> Result<O, Error> {
        if in_work() {
            return Err(CallError::Reentrant { op: self.descriptor.op, rank: self.own.rank }.into());
        }
        if !self.is_settled() {
            self.own.record.flight.wait(self.entry);
            let Descriptor { op, channel, tag, .. } = &*self.descriptor;
            let unit = tag.unit.map(|unit| unit.get());
            let span = tracing::trace_span!("wait", %op, %channel, unit, step = tag.step, microbatch = tag.microbatch);
            span.in_scope(|| self.until_settled());
        }
        let record = &self.own.record;
        record.flight.close(self.entry);
        let output = self.operation.take(self.slot);
        let output = output.inspect_err(|_| self.own.core.abandon(&self.operation))?;
        record.meet(self.descriptor.epoch, &self.operation.ranks);
        Ok(output)
    }

    fn until_settled(&self) {
        let mut wakefulness = Wakefulness::of(&self.own.core);
        let mut clock = WaitClock::start(self.own.options());
        let mut late = Vec::new();
        let _blocked = self.own.record.block_on(&self.operation);
        while !self.operation.is_settled() {
            match clock.alarm() {
                Alarm::None(left) => self.help_or_rest(&mut clock, &mut wakefulness, left),
                Alarm::Late(lateness) => late = self.warn(lateness).unwrap_or(late),
                Alarm::Circle => self.stall(),
                // If members came in at the last moment, their work is waited for once more.
                Alarm::Deadline => {
                    self.own.core.end_late(self.own.rank, &self.operation, &self.descriptor)
                }
            }
        }
        if !late.is_empty() && self.operation.failure().is_none() {
            self.welcome(&late, clock.waited());
        }
        if let Some(endpoint) = self.own.endpoint() {
            endpoint.forget_reports(self.key());
        }
    }

    fn key(&self) -> WaitKey {
        WaitKey::new(&self.descriptor, None)
    }

    /// Has the judge look whether ranks wait for each other.
    fn stall(&self) {
        match self.own.endpoint() {
            None => self.own.core.end_if_circle(self.own.rank),
            Some(_) if self.operation.attendance().is_none() => {}
            Some(endpoint) => endpoint.report(Urgency::Stalled, self.key()),
        }
    }

    /// The rank that keeps the operation from ending, as far as this rank knows.
    fn culprit(&self) -> Option<Rank> {
        let judged = self.own.endpoint().and_then(|endpoint| {
            endpoint.report(Urgency::Late, self.key());
            endpoint.culprit(self.key())
        });
        judged.or_else(|| self.own.core.culprit(self.own.rank, &self.operation))
    }

    /// Does some work, stays awake for a moment, or sleeps for at most `rest`.
    fn help_or_rest(&self, clock: &mut WaitClock, wakefulness: &mut Wakefulness, rest: Duration) {
        if let Some(running) = self.own.core.queue.pick(&self.operation) {
            self.own.core.help(running, Some(&self.operation));
            clock.has_worked();
        } else if self.own.endpoint().is_some_and(|endpoint| endpoint.hear()) {
            clock.has_worked();
        } else if !wakefulness.stay_awake() {
            let is_left_alone =
                self.own.endpoint().is_some_and(|endpoint| endpoint.is_left_alone());
            let rest = if is_left_alone { rest.min(LISTENING) } else { rest };
            self.own.core.sleep_on(&self.operation, from_now(rest));
        }
    }

    /// Names the missing members, so long after the wait began (none, if the work takes so long),
    /// and the culprit: a missing member may itself wait for another.
    fn warn(&self, lateness: Duration) -> Option<Vec<u32>> {
        let attendance = self.operation.attendance();
        let missing = attendance.map_or(Vec::new(), |attendance| attendance.missing);
        let missing: Vec<u32> = missing.into_iter().map(Rank::get).collect();
        let culprit = self.culprit().map(Rank::get);
        let rank = self.own.rank.get();
        let step = self.own.record.step();
        let operation = &self.descriptor;
        if missing.is_empty() {
            hsdp_warnings::warn!(rank, step, %operation, culprit, ?lateness, "the work of an operation takes long");
            return None;
        }
        hsdp_warnings::warn!(rank, step, %operation, ?missing, culprit, ?lateness, "ranks are late");
        Some(missing)
    }

    /// Reports that late members have arrived, and how late they were.
    fn welcome(&self, late: &[u32], lateness: Duration) {
        let rank = self.own.rank.get();
        let step = self.own.record.step();
        let operation = &self.descriptor;
        tracing::info!(rank, step, %operation, ?late, ?lateness, "ranks that were late have arrived");
    }
}

/// The longest sleep of a thread that alone receives the messages of other ranks.
const LISTENING: Duration = Duration::from_millis(1);

/// Moments for which a waiting thread stays awake where each rank has a core: some microseconds, or
/// longer if others take the core that it offers.
const SPINS: u32 = 64;

/// Of these, the last ones, in which it offers its core to others.
const YIELDING: u32 = 58;

/// The same where ranks share cores: it only offers its core. The rank that is waited for may run
/// there, and then no thread needs to be put to sleep and woken, which takes the system far longer.
///
/// A model has none of them: each adds turns to a schedule, and hides the moment between a look at
/// the queue and the sleep.
const SHARED_SPINS: u32 = if cfg!(shuttle) { 0 } else { 16 };

/// Of ranks that exchange messages and share cores, at most so many together: the more of them
/// there are, the later comes the message of the last one, and each moment awake delays it.
const ALL_SPINS: u32 = 256;

/// How much longer a waiting thread stays awake before it sleeps.
struct Wakefulness {
    moments: u32,
}

impl Wakefulness {
    /// With a core for each rank a wait is worth some microseconds of spinning: a sleeper needs as
    /// long to wake. Otherwise the rank that is waited for may need this very core.
    fn of(core: &Core) -> Self {
        let moments = match core.has_a_core_for_each() {
            true => SPINS,
            // Messages come to another thread, which wakes this one.
            false if core.endpoint().is_some() => {
                let ranks = u32::try_from(core.state.records.len()).unwrap_or(u32::MAX);
                SHARED_SPINS.min(ALL_SPINS / ranks.max(1))
            }
            false => SHARED_SPINS,
        };
        Self { moments }
    }

    /// Passes a moment awake; `false` when it is time to sleep.
    ///
    /// There may be a core for each rank, and the system have put two on one all the same, where
    /// something else has the other: a thread that has no answer at once lets the rank run that it
    /// waits for.
    fn stay_awake(&mut self) -> bool {
        if self.moments == 0 {
            return false;
        }
        self.moments -= 1;
        if self.moments < YIELDING {
            thread::yield_now();
        } else {
            (0..8).for_each(|_| hint::spin_loop());
        }
        true
    }
}
