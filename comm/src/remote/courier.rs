//! What is done with letters that go and come, one after the other. `REMOTE.md`, "Progress".

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::alive::Watch;
use super::desk::{Desk, Open, Receiver};
use super::ending::{self, Proposal};
use super::exchanges::ExchangeKey;
use super::letter::{Kind, Letter};
use super::line::InLine;
use super::office::{Errand, Office};
use super::payload::Payload;
use super::probes::Probes;
use super::relay::{Come, Relay};
use super::statement::{self, Brought, end_of, parcel_of, probe_of};
use super::transmit::Parcel;
use super::transport::{Answer, Arrivals, Cause, Loss, Transport, TransportError, Waker};
use crate::backend::thread::{Core, Operation};
use crate::ledger::Messages;
use crate::pattern::rounds;
use crate::{AbortReason, Error};

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
    watch: Watch,
    probes: Probes,
    relay: Relay,
}

thread_local! {
    static IN_TURN: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is sending and receiving: then it waits for nothing that is to come.
pub(super) fn is_in_turn() -> bool {
    IN_TURN.with(Cell::get)
}

/// Runs something in a turn. The turn ends with it, also by a panic.
pub(super) fn in_turn<T>(run: impl FnOnce() -> T) -> T {
    let _turn = Turn::enter();
    run()
}

/// Marks this thread as in a turn until it is dropped.
struct Turn {
    before: bool,
}

impl Turn {
    fn enter() -> Self {
        Self { before: IN_TURN.replace(true) }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        IN_TURN.set(self.before);
    }
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turned {
    /// There was something to be done.
    Something,
    /// There was not; but letters are being sent, or this rank owes others some, or is told how the world ends.
    Sends,
    /// Nor is anything owed; but others are waited for.
    Awaits,
    /// Nothing is under way.
    Idle,
}

impl Courier {
    pub(super) fn new(core: &Arc<Core>, rank: Rank, transport: Box<dyn Transport>) -> Self {
        Self {
            core: Some(Arc::clone(core)),
            rank,
            transport,
            desk: Desk::default(),
            watch: Watch::default(),
            probes: Probes::default(),
            relay: Relay::new(rank, core.records().len()),
        }
    }

    /// Lets go of the world.
    pub(super) fn close(&mut self) {
        // Who has kept a pending operation may wait for it yet.
        let core = if self.desk.is_awaited() { self.core.clone() } else { self.core.take() };
        if self.core.is_none() {
            self.desk.clear();
        }
        self.transport.close(core.and_then(|core| core.status().world_end()).as_ref());
    }

    pub(super) fn turn(&mut self, office: &Office) -> Turned {
        let Some(core) = self.core.clone() else { return Turned::Idle };
        in_turn(|| {
            let turned = self.try_turn(&core, office);
            let turned = turned.unwrap_or_else(|TransportError { peer, problem }| {
                let reason = AbortReason::Unreachable { problem: problem.into() };
                core.end(core.ended_by(peer.unwrap_or(self.rank), reason));
                Turned::Awaits
            });
            office.try_end(&core);
            turned
        })
    }

    /// Whether the transport calls `waker` for what comes.
    pub(super) fn wake_by(&mut self, waker: Waker) -> Arrivals {
        self.transport.wake_by(waker)
    }

    /// Whether contributions to an exchange have come down the tree.
    pub(super) fn has_heard_of(&self, key: ExchangeKey) -> bool {
        self.relay.has_heard_of(key)
    }

    /// Whether the process that forwards all messages answers.
    pub(super) fn forwarder(&mut self) -> Answer {
        self.transport.forwarder()
    }

    /// Ends the world if a rank is lost that has not said that it leaves, or if this process reaches no other rank.
    fn look_for_losses(&mut self, core: &Core) {
        let mut lost: Vec<(Rank, AbortReason)> = Vec::new();
        match self.transport.lost() {
            Ok(losses) => {
                for Loss { rank, cause } in losses {
                    if matches!(cause, Cause::Unreachable(_)) || self.watch.is_settled(rank) {
                        lost.push((rank, self.reason(rank, cause)));
                    }
                }
            }
            // At once: the rank at fault may hear of this loss from others, and end its process for it.
            Err(Loss { rank, cause }) => {
                if core.status().check_world().is_ok() {
                    core.end(core.ended_by(rank, self.reason(rank, cause)));
                }
            }
        }
        let gone = self.watch.gone().into_iter().map(|rank| (rank, AbortReason::Gone));
        for (rank, reason) in gone.chain(lost) {
            self.watch.forget(rank);
            // The rank may be one of a larger world only.
            if core.records().get(rank.index()).is_some_and(|record| !record.has_left()) {
                // No rank waits for its answer about the end.
                core.record(rank).leave();
                core.end(core.ended_by(rank, reason));
            }
        }
    }

    /// The reason that the error gives for a loss.
    pub(super) fn reason(&self, rank: Rank, cause: Cause) -> AbortReason {
        match cause {
            Cause::Ended(_) if self.watch.is_gone(rank) => AbortReason::Gone,
            Cause::Ended(problem) | Cause::Unreachable(problem) => {
                AbortReason::Unreachable { problem: problem.into() }
            }
        }
    }

    fn try_turn(&mut self, core: &Arc<Core>, office: &Office) -> Result<Turned, TransportError> {
        let (mut is_busy, failed) = self.run_errands(core, office.errands());
        self.take_in((core, office));
        is_busy |= self.open_in_line(core, office);
        for _ in 0..LETTERS {
            let Some((from, buffer)) = self.transport.receive()? else { break };
            is_busy = true;
            let read = Letter::read(buffer).and_then(|letter| {
                if from.index() >= core.records().len() {
                    // A process that is no rank of this world: only what it asks for is compared.
                    return greeted(office, from, &letter);
                }
                self.deliver((core, office), from, letter)
            });
            if let Err(problem) = read {
                let reason = AbortReason::Garbled { problem: problem.into() };
                core.end(core.ended_by(from, reason));
            }
            self.take_in((core, office));
        }
        self.relay.look_for_overdue();
        self.take_in((core, office));
        self.relay_on()?;
        self.look_for_losses(core);
        let under_way = self.transport.under_way()?;
        if core.status().world_end().is_some() {
            self.desk.clear();
            self.relay.clear();
            office.clear_line();
        }
        let (owes, line_is_over) = (self.desk.owes(), office.line().is_over());
        let is_needed = office.is_going() && self.is_needed(core);
        if !owes && !is_needed && line_is_over {
            office.farewell();
        }
        failed?;
        let stays = self.lingers(core, office) || office.is_deciding(core);
        Ok(match is_busy {
            true => Turned::Something,
            false if owes || under_way > 0 || stays => Turned::Sends,
            false if self.desk.awaits() || self.relay.holds() || is_needed || !line_is_over => {
                Turned::Awaits
            }
            false => Turned::Idle,
        })
    }

    /// Whether other ranks depend on this one to get contributions to exchanges.
    fn is_needed(&self, core: &Core) -> bool {
        self.relay.owes(|rank, epoch| {
            let record = core.record(rank);
            record.has_left() || record.has_stopped(epoch)
        })
    }

    /// Whether this rank has left, and others are on their way to what it has issued: their letters are received, or they could not
    /// be sent.
    fn lingers(&mut self, core: &Core, office: &Office) -> bool {
        office.lingers() && self.desk.expects(|rank| !core.record(rank).has_left())
    }

    /// Whether there were any, and what failed first: the others are run all the same.
    fn run_errands(
        &mut self,
        core: &Core,
        errands: VecDeque<Errand>,
    ) -> (bool, Result<(), TransportError>) {
        let (any, mut failed) = (!errands.is_empty(), Ok(()));
        for errand in errands {
            match errand {
                Errand::Send { to, letter } => {
                    core.record(self.rank).ledger.moved(sent(&letter, to.len()));
                    for to in to {
                        failed = failed.and(self.transport.send(to, &letter));
                    }
                }
                Errand::Exchange { key, letter } => {
                    self.relay.contribute(key, &letter);
                }
                Errand::Open { receiver, operation } => self.open(core, receiver, &operation),
            }
        }
        (any, failed)
    }

    /// Lays into an operation what has come of it before.
    fn open(&mut self, core: &Core, receiver: Arc<dyn Receiver>, operation: &Arc<Operation>) {
        for (from, parcel) in self.desk.open(receiver, Arc::clone(operation)) {
            if let Err(problem) = self.desk.put(from, parcel) {
                let reason = AbortReason::Garbled { problem: problem.into() };
                core.end(core.ended_by(from, reason));
            }
        }
        let opened = self.desk.gathering();
        let opened = opened.filter(|it| Arc::ptr_eq(it.operation(), operation));
        opened.for_each(|it| self.look(core, it));
    }

    /// Opens the next operation in line, while there is one that is to be opened now; whether there was.
    fn open_in_line(&mut self, core: &Core, office: &Office) -> bool {
        let mut any = false;
        loop {
            let Some(InLine { receiver, operation }) = office.line().next() else { return any };
            self.open(core, receiver, &operation);
            any = true;
        }
    }

    /// Sends on what this rank relays.
    fn relay_on(&mut self) -> Result<(), TransportError> {
        let outgoing = self.relay.outgoing();
        outgoing.iter().try_for_each(|(to, letter)| self.transport.send(*to, letter))
    }

    /// Takes in the contributions that have come, before any message that came after them.
    fn take_in(&mut self, (core, office): (&Core, &Office)) {
        // Before a rank hears of it that could ask for the counts.
        self.relay.note_in(&core.record(self.rank).ledger);
        while let Some((from, come)) = self.relay.next_come() {
            let read = match come {
                Come::Contribution(parcel) => parcel.and_then(|it| self.put(core, from, it)),
                Come::Last(letter) => self.deliver((core, office), from, letter),
            };
            if let Err(problem) = read {
                let reason = AbortReason::Garbled { problem: problem.into() };
                core.end(core.ended_by(from, reason));
            }
        }
    }

    /// A rank's part in an operation has come.
    fn put(&mut self, core: &Core, from: Rank, parcel: Parcel) -> Result<(), String> {
        let Parcel { brought: Brought { descriptor, step, .. }, round, .. } = &parcel;
        if *round >= rounds(descriptor.op) {
            return Err(format!("there is no round {round} of {descriptor}"));
        }
        if core.record(from).hear(descriptor, *step) {
            core.forget_old_epochs();
            self.desk.forget_before(core.record(self.rank).epoch().saturating_sub(1));
        }
        self.desk.put(from, parcel)
    }

    fn deliver(
        &mut self,
        (core, office): (&Core, &Office),
        from: Rank,
        letter: Letter,
    ) -> Result<(), String> {
        match letter.kind() {
            Kind::Parcel => {
                let brought = parcel_of(letter.statement())?;
                let (round, payload) = (letter.round(), Payload::whole(letter));
                self.put(core, from, Parcel { brought, round, payload })
            }
            Kind::Probe => {
                let path = probe_of(letter.statement())?;
                self.probes.follow((core, office), self.rank, path);
                Ok(())
            }
            Kind::Stop | Kind::Left if !self.relay.is_in_order(from, letter.exchanged()) => {
                self.relay.hold_back(from, letter);
                Ok(())
            }
            Kind::Exchange => self.relay.receive(from, letter),
            Kind::Stop => {
                let (epoch, end) = end_of(letter.statement())?;
                if !core.record(from).stop(epoch) {
                    return Err(format!("it ends epoch {epoch}, but not all epochs before"));
                }
                core.end_epoch(epoch, end);
                self.look_at_all(core);
                Ok(())
            }
            Kind::End => {
                let (origin, error) = end_of(letter.statement())?;
                let origin = usize::try_from(origin).ok().filter(|it| *it < core.records().len());
                let origin =
                    Rank::new(origin.ok_or("it names a rank that the world does not have")?);
                let answer = self.answer(core, &error);
                let proposal = Proposal { origin, error };
                match answer {
                    Some(own) => office.hear_blame(from, proposal, own),
                    None => office.hear_end(from, proposal),
                }
                Ok(())
            }
            Kind::Left => {
                core.record(from).leave();
                core.status().ring();
                self.look_at_all(core);
                Ok(())
            }
            Kind::Hello => {
                self.watch.see(from, &statement::read(letter.statement())?);
                greeted(office, from, &letter)
            }
        }
    }

    /// What this rank says where it is named as late, and waits for others itself: whom it waits for.
    fn answer(&self, core: &Core, error: &Error) -> Option<Proposal> {
        if ending::late(error) != Some(self.rank) {
            return None;
        }
        let Error::WorldAborted { reason: AbortReason::Deadline { deadline, .. }, .. } = error
        else {
            return None;
        };
        let operation = core.record(self.rank).issuer_blocked_on()?;
        let (awaited, missing) = operation.gathering(self.rank)?;
        let culprit = *missing.first()?;
        let is_there = |rank: &&Rank| !missing.contains(rank);
        let arrived = operation.ranks().iter().filter(is_there).copied().collect();
        let reason = AbortReason::Deadline { awaited, deadline: *deadline, arrived, missing };
        Some(Proposal { origin: self.rank, error: core.ended_by(culprit, reason) })
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

/// How a message to so many ranks counts.
fn sent(letter: &Letter, receivers: usize) -> Messages {
    let (count, none) = (receivers as u64, Messages::default());
    match letter.kind() {
        Kind::Parcel => Messages { data: count, ..none },
        Kind::Probe => Messages { background: count, ..none },
        _ => none,
    }
}

/// Takes in a hello. Other messages of processes beyond the ranks mean nothing here.
fn greeted(office: &Office, from: Rank, letter: &Letter) -> Result<(), String> {
    match letter.kind() {
        Kind::Hello => office.greeted(from, statement::read(letter.statement())?),
        _ => Ok(()),
    }
}
