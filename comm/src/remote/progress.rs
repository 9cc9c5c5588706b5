//! Messages are sent and taken in, one after the other. `REMOTE.md`, "Progress".

use std::cell::Cell;
use std::sync::Arc;

use hsdp_sharding::Rank;

use self::deliver::look;
use super::alive::Watch;
use super::comparer::{Action, Compared, Comparer};
use super::endpoint::{Endpoint, Request};
use super::header;
use super::mailbox::{Mailbox, Receiver};
use super::message::{Kind, MOST_STATEMENT, Message};
use super::relay::Relay;
use super::transport::{Answer, Arrivals, Cause, Loss, Losses, Transport, TransportError, Waker};
use super::tree::Tree;
use crate::AbortReason;
use crate::engine::Record;
use crate::engine::{Operation, Shared};
use crate::ledger::Messages;
use crate::sync;

mod deliver;

/// How many messages one turn takes in: what is to be sent waits meanwhile.
const MESSAGES: usize = 64;

/// Sends, receives, and lays what came where it belongs. One thread at a time does.
#[derive(Debug)]
pub(super) struct Progress {
    /// Until the world is gone: it holds this in turn.
    core: Option<Arc<Shared>>,
    rank: Rank,
    transport: Box<dyn Transport>,
    mailbox: Mailbox,
    watch: Watch,
    comparer: Comparer,
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

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turned {
    /// There was something to be done.
    Something,
    /// There was not; but messages are being sent, or this rank owes others some, or is told how the world ends.
    Sends,
    /// This rank leaves, and others get contributions to exchanges through it.
    Relays,
    /// Nor is anything owed; but others are waited for.
    Awaits,
    /// Nothing is under way.
    Idle,
}

impl Progress {
    pub(super) fn new(core: &Arc<Shared>, rank: Rank, transport: Box<dyn Transport>) -> Self {
        Self {
            core: Some(Arc::clone(core)),
            rank,
            mailbox: Mailbox::default(),
            watch: Watch::of(rank),
            comparer: Comparer::default(),
            relay: Relay::new(match transport.losses() {
                Losses::Seen => Tree::new(rank, core.records().len()),
                Losses::Reported => Tree::flat(rank, core.records().len()),
            }),
            transport,
        }
    }

    /// Lets go of the world.
    pub(super) fn close(&mut self) {
        // A rank that has kept a pending operation may wait for it yet.
        let core = if self.mailbox.is_awaited() { self.core.clone() } else { self.core.take() };
        if self.core.is_none() {
            self.mailbox.clear();
        }
        self.transport.close(core.and_then(|core| core.status().world_end()).as_ref());
    }

    pub(super) fn turn(&mut self, endpoint: &Endpoint) -> Turned {
        let Some(core) = self.core.clone() else { return Turned::Idle };
        in_turn(|| {
            let turned = self.try_turn(&core, endpoint);
            let turned = turned.unwrap_or_else(|TransportError { peer, problem }| {
                let reason = AbortReason::Unreachable { problem: problem.into() };
                endpoint.end_by(&core, peer.unwrap_or(self.rank), reason);
                Turned::Awaits
            });
            endpoint.try_end(&core);
            turned
        })
    }

    /// Whether the transport calls `waker` for what comes.
    pub(super) fn wake_by(&mut self, waker: Waker) -> Arrivals {
        self.transport.wake_by(waker)
    }

    /// Whether the process that forwards all messages answers.
    pub(super) fn forwarder(&mut self) -> Answer {
        self.transport.forwarder()
    }

    /// Ends the world if a rank is lost that has not said that it leaves, or if this process reaches no other rank.
    fn look_for_losses(&mut self, core: &Shared, endpoint: &Endpoint) {
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
                    endpoint.end_by(core, rank, self.reason(rank, cause));
                }
            }
        }
        let gone = match self.transport.losses() {
            Losses::Seen => self.watch.gone(),
            Losses::Reported => Vec::new(),
        };
        let gone = gone.into_iter().map(|rank| (rank, AbortReason::Gone));
        for (rank, reason) in gone.chain(lost) {
            self.watch.forget(rank);
            // The rank may be one of a larger world only.
            let is_there = |record: &Arc<Record>| !record.has_left() && !self.relay.leaves(rank);
            if core.records().get(rank.index()).is_some_and(is_there) {
                // No rank waits for its answer about the end.
                core.record(rank).leave();
                endpoint.end_by(core, rank, reason);
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

    fn try_turn(
        &mut self,
        core: &Arc<Shared>,
        endpoint: &Endpoint,
    ) -> Result<Turned, TransportError> {
        let (mut is_busy, failed) = self.run_requests((core, endpoint));
        self.take_in((core, endpoint));
        for _ in 0..MESSAGES {
            let Some((from, buffer)) = self.transport.receive()? else { break };
            is_busy = true;
            let read = Message::read(buffer).and_then(|message| {
                if from.index() >= core.records().len() {
                    // A process that is no rank of this world: only what it asks for is compared.
                    return deliver::greeted(endpoint, from, &message);
                }
                self.deliver((core, endpoint), from, message)
            });
            if let Err(problem) = read {
                endpoint.end_garbled(core, from, problem);
            }
            self.take_in((core, endpoint));
        }
        self.relay.look_for_overdue();
        self.take_in((core, endpoint));
        self.relay_on()?;
        self.look_for_losses(core, endpoint);
        self.compare(core, endpoint);
        let under_way = self.transport.under_way()?;
        if core.status().world_end().is_some() {
            self.mailbox.clear();
            self.relay.clear();
            self.comparer = Comparer::default();
        }
        let owes = self.mailbox.owes();
        if !owes && !self.relay.holds() {
            endpoint.farewell(core);
        }
        failed?;
        let stays = self.lingers(core, endpoint) || endpoint.is_deciding();
        Ok(match is_busy {
            true => Turned::Something,
            false if owes || under_way > 0 || stays => Turned::Sends,
            false if endpoint.is_leaving() && self.is_needed(core) => Turned::Relays,
            false if self.mailbox.awaits() || self.relay.holds() => Turned::Awaits,
            false if self.comparer.is_busy() => Turned::Awaits,
            false => Turned::Idle,
        })
    }

    /// Whether other ranks depend on this one to get contributions to exchanges.
    fn is_needed(&self, core: &Shared) -> bool {
        self.relay.owes(|rank, epoch| {
            let record = core.record(rank);
            record.has_left() || record.has_stopped(epoch)
        })
    }

    /// Whether this rank has left, and others are on their way to what it has issued: their messages are received, or they could not
    /// be sent.
    fn lingers(&mut self, core: &Shared, endpoint: &Endpoint) -> bool {
        endpoint.lingers() && self.mailbox.expects(|rank| !core.record(rank).has_left())
    }

    /// Whether there were any, and what failed first: the others are run all the same.
    fn run_requests(
        &mut self,
        (core, endpoint): (&Shared, &Endpoint),
    ) -> (bool, Result<(), TransportError>) {
        let requests = endpoint.requests();
        let (any, mut failed) = (!requests.is_empty(), Ok(()));
        for request in requests {
            match request {
                Request::Send { to, message } => {
                    core.record(self.rank).ledger.moved(sent(&message, to.len()));
                    failed = failed.and(self.transport.send(&to, &message));
                }
                Request::Exchange { key, message } => {
                    self.relay.contribute(key, &message);
                }
                Request::Compare { to, said } if to == self.rank => {
                    self.hear((core, endpoint), to, said);
                }
                Request::Compare { to, said } => {
                    failed = failed.and(self.tell(core, to, &said));
                }
                Request::Open { receiver, operation } => {
                    self.open((core, endpoint), receiver, &operation);
                }
            }
        }
        (any, failed)
    }

    /// Lays into an operation what has come of it before.
    fn open(
        &mut self,
        (core, endpoint): (&Shared, &Endpoint),
        receiver: Arc<dyn Receiver>,
        operation: &Arc<Operation>,
    ) {
        for (from, message) in self.mailbox.open(receiver, Arc::clone(operation)) {
            if let Err(problem) = self.mailbox.put(from, message) {
                endpoint.end_garbled(core, from, problem);
            }
        }
        let opened = self.mailbox.gathering();
        let opened = opened.filter(|it| Arc::ptr_eq(it.operation(), operation));
        opened.for_each(|it| look((core, endpoint), it));
    }

    /// Has the comparer do what is due.
    fn compare(&mut self, core: &Shared, endpoint: &Endpoint) {
        let is_there = |rank: &Rank| *rank == self.rank || !core.record(*rank).has_left();
        let there = || (0..core.records().len()).map(Rank::new).filter(is_there).collect();
        for action in self.comparer.turn(sync::now(), there) {
            match action {
                Action::Say(to, said) => endpoint.post(Request::Compare { to, said }),
                Action::End(error) => drop(endpoint.end(core, error)),
            }
        }
    }

    /// Tells another rank something, of this rank's comparer or to its.
    fn tell(&mut self, core: &Shared, to: Rank, said: &Compared) -> Result<(), TransportError> {
        let header = header::bytes(said);
        let message = Message::write(&Arc::default(), (Kind::Compare, 0), &header, 0);
        // Without it, this rank counts as one that does not answer.
        let message = message.filter(|_| header.len() <= MOST_STATEMENT);
        message.map_or(Ok(()), |message| {
            core.record(self.rank).ledger.moved(BACKGROUND);
            self.transport.send(&[to], &Arc::new(message))
        })
    }

    /// Another rank, or this one, tells something.
    fn hear(&mut self, (core, endpoint): (&Shared, &Endpoint), from: Rank, said: Compared) {
        match said {
            Compared::Report(report) => self.comparer.report(from, report),
            Compared::State(number, state) => self.comparer.answer(from, number, state),
            Compared::Differ => self.comparer.differ(),
            Compared::Verdict(verdict) => endpoint.hear_verdict(verdict),
            Compared::Question(question) => {
                let state = endpoint.state(core, question.calls);
                let said = Compared::State(question.number, state);
                endpoint.post(Request::Compare { to: from, said });
            }
        }
    }

    /// Sends on what this rank relays.
    fn relay_on(&mut self) -> Result<(), TransportError> {
        let outgoing = self.relay.outgoing();
        let send = |(to, message): &(Vec<Rank>, Arc<Message>)| self.transport.send(to, message);
        // One that fails keeps no other from its receiver.
        outgoing.iter().map(send).fold(Ok(()), Result::and)
    }
}

/// How a message of the comparer counts.
const BACKGROUND: Messages = Messages { data: 0, control: 0, background: 1, forwarded: 0 };

/// How a message to so many ranks counts.
fn sent(message: &Message, receivers: usize) -> Messages {
    let (count, none) = (receivers as u64, Messages::default());
    match message.kind() {
        Kind::Data => Messages { data: count, ..none },
        _ => none,
    }
}
