//! What is done with letters that go and come, one after the other. `REMOTE.md`, "The courier".

use std::collections::VecDeque;
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::desk::{Desk, Open, Parcel};
use super::letter::{Kind, Letter};
use super::office::{Errand, Office};
use super::statement::{self, descriptor_of, end_of};
use super::transport::{Transport, TransportError};
use crate::local::Core;
use crate::AbortReason;

/// How many letters one turn takes in: what is to be sent waits meanwhile.
const LETTERS: usize = 64;

/// Sends, receives, and lays what came where it belongs. One thread at a time does.
#[derive(Debug)]
pub(super) struct Courier {
    /// Until the world is gone: it holds this in turn.
    core: Option<Arc<Core>>,
    rank: Rank,
    transport: Box<dyn Transport>,
    desk: Desk,
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turned {
    /// There was something to be done.
    Something,
    /// There was not; but others are waited for, or letters are being sent.
    Nothing,
    /// Nor is anything under way.
    Idle,
}

impl Courier {
    pub(super) fn new(core: &Arc<Core>, rank: Rank, transport: Box<dyn Transport>) -> Self {
        Self { core: Some(Arc::clone(core)), rank, transport, desk: Desk::default() }
    }

    /// Lets go of the world.
    pub(super) fn close(&mut self) {
        self.desk.clear();
        let core = self.core.take();
        self.transport.close(core.and_then(|core| core.status().world_end()).as_ref());
    }

    pub(super) fn turn(&mut self, office: &Office) -> Turned {
        let Some(core) = self.core.clone() else { return Turned::Idle };
        self.try_turn(&core, office).unwrap_or_else(|TransportError { peer, problem }| {
            let reason = AbortReason::Unreachable { problem: problem.into() };
            core.end(core.ended_by(peer.unwrap_or(self.rank), reason));
            Turned::Idle
        })
    }

    fn try_turn(&mut self, core: &Arc<Core>, office: &Office) -> Result<Turned, TransportError> {
        let mut is_busy = self.run_errands(core, office.errands())?;
        for _ in 0..LETTERS {
            let Some((from, buffer)) = self.transport.receive()? else { break };
            is_busy = true;
            let read = Letter::read(buffer).and_then(|letter| self.deliver((core, office), from, letter));
            if let Err(problem) = read {
                let reason = AbortReason::Garbled { problem: problem.into() };
                core.end(core.ended_by(from, reason));
            }
        }
        let sending = self.transport.sending()?;
        if core.status().world_end().is_some() {
            self.desk.clear();
        }
        if !self.desk.owes() {
            office.farewell();
        }
        Ok(match (is_busy, sending > 0 || !self.desk.is_empty()) {
            (true, _) => Turned::Something,
            (false, true) => Turned::Nothing,
            (false, false) => Turned::Idle,
        })
    }

    /// Whether there were any.
    fn run_errands(
        &mut self,
        core: &Core,
        errands: VecDeque<Errand>,
    ) -> Result<bool, TransportError> {
        let any = !errands.is_empty();
        for errand in errands {
            match errand {
                Errand::Send { to, letter } => {
                    to.into_iter().try_for_each(|to| self.transport.send(to, &letter))?;
                }
                Errand::Open { receiver, operation } => {
                    for parcel in self.desk.open(receiver, Arc::clone(&operation)) {
                        let from = parcel.from;
                        if let Err(problem) = self.desk.put(parcel) {
                            let reason = AbortReason::Garbled { problem: problem.into() };
                            core.end(core.ended_by(from, reason));
                        }
                    }
                    let opened = self.desk.gathering();
                    let opened = opened.filter(|it| Arc::ptr_eq(it.operation(), &operation));
                    opened.for_each(|it| self.look(core, it));
                }
            }
        }
        Ok(any)
    }

    fn deliver(
        &mut self,
        (core, office): (&Core, &Office),
        from: Rank,
        letter: Letter,
    ) -> Result<(), String> {
        match letter.kind() {
            Kind::Parcel => {
                let descriptor = Arc::new(descriptor_of(letter.statement())?);
                let record = core.record(from);
                if record.hear(&descriptor) {
                    core.forget_old_epochs();
                    self.desk.forget_before(core.record(self.rank).epoch().saturating_sub(1));
                }
                self.desk.put(Parcel { from, descriptor, letter })
            }
            Kind::Stop => {
                let (epoch, end) = end_of(letter.statement())?;
                core.record(from).stop(epoch);
                core.end_epoch(epoch, end);
                self.look_at_all(core);
                Ok(())
            }
            Kind::End => {
                let (_, end) = end_of(letter.statement())?;
                core.end(end);
                Ok(())
            }
            Kind::Left => {
                core.record(from).leave();
                core.status().ring();
                self.look_at_all(core);
                Ok(())
            }
            Kind::Hello => office.greeted(from, statement::read(letter.statement())?),
        }
    }

    fn look_at_all(&self, core: &Core) {
        self.desk.gathering().for_each(|open| self.look(core, open));
    }

    /// Ends an operation of which a member is missing that does not come any more.
    fn look(&self, core: &Core, open: &Open) {
        let descriptor = open.descriptor();
        for rank in open.missing().filter(|rank| *rank != self.rank) {
            let record = core.record(rank);
            if record.has_stopped(descriptor.epoch) {
                return core.fail_in_epoch(open.operation(), descriptor.epoch);
            }
            if record.has_left() {
                let awaited = Arc::clone(descriptor);
                core.end(core.ended_by(rank, AbortReason::Left { awaited }));
                return;
            }
        }
    }
}
