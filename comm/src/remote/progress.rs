//! Messages are sent and taken in, one after the other. `REMOTE.md`, "Progress".

use std::cell::Cell;
use std::mem;
use std::sync::Arc;

use hsdp_sharding::Rank;

use self::deliver::look;
use super::alive::Processes;
use super::comparer::{Compared, Comparer, ComparerAction};
use super::endpoint::{Endpoint, EndpointRequest};
use super::header;
use super::mailbox::{Mailbox, Open};
use super::message::{MOST_STATEMENT, MessageKind, RankMessage};
use super::relay::Relay;
use super::transport::{Cause, PeerLoss, Transport, TransportError};
use super::tree::Tree;
use crate::engine::Record;
use crate::ledger::Messages;
use crate::{AbortReason, Error, sync};

mod deliver;

/// The number of messages that one turn takes in: requests wait meanwhile.
const MESSAGES: usize = 64;

/// Sends, receives, and puts messages where they belong. One thread at a time does.
pub(super) struct Progress {
    pub(super) transport: Box<dyn Transport>,
    mailbox: Mailbox,
    processes: Processes,
    comparer: Comparer,
    relay: Relay,
    /// Whether nothing more is sent or received.
    is_over: bool,
}

thread_local! {
    static IN_TURN: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is sending and receiving: then it waits for no message.
pub(super) fn is_in_turn() -> bool {
    IN_TURN.with(Cell::get)
}

/// Runs something in a turn. The turn ends with it, also by a panic.
pub(super) fn in_turn<T>(run: impl FnOnce() -> T) -> T {
    let _turn = Turn { before: IN_TURN.replace(true) };
    run()
}

/// Marks this thread as in a turn until it is dropped.
struct Turn {
    before: bool,
}

impl Drop for Turn {
    fn drop(&mut self) {
        IN_TURN.set(self.before);
    }
}

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProgressTurn {
    /// There was something to be done.
    Something,
    /// There was not; but messages are being sent, or this rank owes others some, or is told how the world ends.
    Sends,
    /// This rank leaves, and others get contributions to exchanges through it.
    Relays,
    /// Nor is anything owed; but others are waited for.
    Awaits,
    /// No operation is under way.
    Idle,
}

impl Progress {
    pub(super) fn new(rank: Rank, size: usize, transport: Box<dyn Transport>) -> Self {
        let tree = if transport.is_forwarded() { Tree::flat } else { Tree::new };
        Self {
            transport,
            mailbox: Mailbox::default(),
            processes: Processes::of(rank),
            comparer: Comparer::default(),
            relay: Relay::new(tree(rank, size)),
            is_over: false,
        }
    }

    /// The world is gone; `end` says how, if it ended early.
    pub(super) fn close(&mut self, end: Option<&Error>) {
        // A rank that has kept a pending operation may wait for it yet.
        if !self.mailbox.is_awaited() {
            self.is_over = true;
            self.mailbox.clear();
        }
        self.transport.close(end);
    }

    pub(super) fn turn(&mut self, endpoint: &Endpoint) -> ProgressTurn {
        if self.is_over {
            return ProgressTurn::Idle;
        }
        in_turn(|| {
            let turned = self.try_turn(endpoint);
            let turned = turned.unwrap_or_else(|TransportError { peer, problem }| {
                let reason = AbortReason::Unreachable { problem: problem.into() };
                endpoint.end_by(peer.unwrap_or(endpoint.rank), reason);
                ProgressTurn::Awaits
            });
            endpoint.try_end();
            turned
        })
    }

    /// Ends the world if a rank is lost that has not said that it leaves, or if this process reaches no other rank.
    fn look_for_losses(&mut self, endpoint: &Endpoint) {
        let mut lost = Vec::new();
        if !self.transport.is_forwarded() {
            lost.extend(self.processes.gone().into_iter().map(|rank| (rank, AbortReason::Gone)));
        }
        match self.transport.lost() {
            Ok(losses) => {
                for PeerLoss { rank, cause } in losses {
                    let is_unreachable = matches!(cause, Cause::Unreachable(_));
                    if is_unreachable || self.processes.is_settled(rank) {
                        lost.push((rank, self.reason(rank, cause)));
                    }
                }
            }
            // At once: the rank at fault may hear of this loss from others, and end its process for it.
            Err(PeerLoss { rank, cause }) => {
                if endpoint.state.early_ends.check_world().is_ok() {
                    endpoint.end_by(rank, self.reason(rank, cause));
                }
            }
        }
        for (rank, reason) in lost {
            self.processes.forget(rank);
            // The rank may be one of a larger world only.
            let is_there = |record: &&Arc<Record>| !record.has_left() && !self.relay.leaves(rank);
            if let Some(record) = endpoint.state.records.get(rank.index()).filter(is_there) {
                // No rank waits for its answer about the end.
                record.leave();
                endpoint.end_by(rank, reason);
            }
        }
    }

    /// The reason that the error gives for a loss.
    pub(super) fn reason(&self, rank: Rank, cause: Cause) -> AbortReason {
        match cause {
            Cause::Ended(_) if self.processes.is_gone(rank) => AbortReason::Gone,
            Cause::Ended(problem) | Cause::Unreachable(problem) => {
                AbortReason::Unreachable { problem: problem.into() }
            }
        }
    }

    fn try_turn(&mut self, endpoint: &Endpoint) -> Result<ProgressTurn, TransportError> {
        let (has_sent, failed) = self.run_requests(endpoint);
        let is_busy = self.receive(endpoint)? || has_sent;
        self.relay.look_for_overdue();
        self.take_in(endpoint);
        self.relay_on()?;
        self.look_for_losses(endpoint);
        self.compare(endpoint);
        let under_way = self.transport.under_way()?;
        if endpoint.state.early_ends.world_end().is_some() {
            self.mailbox.clear();
            self.relay.clear();
            self.comparer = Comparer::default();
        }
        let owes = self.mailbox.owes();
        let holds = self.relay.exchanges.holds();
        if !owes && !holds {
            endpoint.farewell();
        }
        failed?;
        let stays = self.lingers(endpoint) || endpoint.is_deciding();
        Ok(match is_busy {
            true => ProgressTurn::Something,
            false if owes || under_way > 0 || stays => ProgressTurn::Sends,
            false if endpoint.is_leaving() && self.is_needed(endpoint) => ProgressTurn::Relays,
            false if self.mailbox.awaits() || holds => ProgressTurn::Awaits,
            false if self.comparer.is_busy() => ProgressTurn::Awaits,
            false => ProgressTurn::Idle,
        })
    }

    /// Takes in some of the messages that have come; whether there were any.
    fn receive(&mut self, endpoint: &Endpoint) -> Result<bool, TransportError> {
        for count in 0..MESSAGES {
            self.take_in(endpoint);
            let Some((from, buffer)) = self.transport.receive()? else { return Ok(count > 0) };
            let read = RankMessage::read(buffer).and_then(|message| {
                if from.index() >= endpoint.state.records.len() {
                    // A process that is no rank of this world: only its request is compared.
                    return deliver::greeted(endpoint, from, &message);
                }
                self.deliver(endpoint, from, message)
            });
            if let Err(problem) = read {
                endpoint.end_garbled(from, problem);
            }
        }
        Ok(true)
    }

    /// Whether other ranks depend on this one to get contributions to exchanges.
    fn is_needed(&self, endpoint: &Endpoint) -> bool {
        self.relay.exchanges.owes(|rank, epoch| {
            let record = endpoint.state.record(rank);
            record.has_left() || record.has_stopped(epoch)
        })
    }

    /// Whether this rank has left, and others are on their way to operations that it has issued: their messages are received, or they could not
    /// be sent.
    fn lingers(&mut self, endpoint: &Endpoint) -> bool {
        let is_there = |rank| !endpoint.state.record(rank).has_left();
        endpoint.lingers() && self.mailbox.expects(is_there)
    }

    /// Whether there were any, and the first failure: the others are run all the same.
    fn run_requests(&mut self, endpoint: &Endpoint) -> (bool, Result<(), TransportError>) {
        let requests = endpoint.requests();
        let any = !requests.is_empty();
        let mut failed = Ok(());
        for request in requests {
            match request {
                EndpointRequest::Send { to, message } => {
                    if message.kind() == MessageKind::Data {
                        let data = Messages { data: to.len() as u64, ..Messages::default() };
                        endpoint.state.record(endpoint.rank).ledger.moved(data);
                    }
                    failed = failed.and(self.transport.send(&to, &message));
                }
                EndpointRequest::Exchange { key, message } => self.relay.contribute(key, &message),
                EndpointRequest::Compare { to, said } if to == endpoint.rank => {
                    self.hear(endpoint, to, said);
                }
                EndpointRequest::Compare { to, said } => {
                    failed = failed.and(self.tell(endpoint, to, &said));
                }
                EndpointRequest::Open(open) => self.open(endpoint, open),
            }
        }
        (any, failed)
    }

    /// Lays into an operation the messages that have come of it before.
    fn open(&mut self, endpoint: &Endpoint, open: Open) {
        let operation = Arc::clone(&open.operation);
        for (from, message) in self.mailbox.open(open) {
            if let Err(problem) = self.mailbox.put(from, message) {
                endpoint.end_garbled(from, problem);
            }
        }
        let opened = self.mailbox.gathering();
        let opened = opened.filter(|it| Arc::ptr_eq(&it.operation, &operation));
        opened.for_each(|it| look(endpoint, it));
    }

    /// Has the comparer do its deeds that are due.
    fn compare(&mut self, endpoint: &Endpoint) {
        let Endpoint { state, rank: own, .. } = endpoint;
        let is_there = |rank: &Rank| rank == own || !state.record(*rank).has_left();
        let there = || (0..state.records.len()).map(Rank::new).filter(is_there).collect();
        for action in self.comparer.turn(sync::now(), there) {
            match action {
                ComparerAction::Say(to, said) => {
                    endpoint.post(EndpointRequest::Compare { to, said })
                }
                ComparerAction::End(error) => drop(endpoint.end(error)),
            }
        }
    }

    /// Tells another rank something, of this rank's comparer or to its.
    fn tell(
        &mut self,
        endpoint: &Endpoint,
        to: Rank,
        said: &Compared,
    ) -> Result<(), TransportError> {
        let header = header::bytes(said);
        let message = RankMessage::write(&Arc::default(), MessageKind::Compare, 0, &header, 0);
        // Without it, this rank counts as one that does not answer.
        let message = message.filter(|_| header.len() <= MOST_STATEMENT);
        message.map_or(Ok(()), |message| {
            endpoint.state.record(endpoint.rank).ledger.moved(BACKGROUND);
            self.transport.send(&[to], &Arc::new(message))
        })
    }

    /// Another rank, or this one, tells something.
    fn hear(&mut self, endpoint: &Endpoint, from: Rank, said: Compared) {
        match said {
            Compared::Report(report) => self.comparer.reports.push((from, report)),
            Compared::State(number, state) => self.comparer.answer(from, number, state),
            Compared::Differ => self.comparer.differs = true,
            Compared::Verdict(verdict) => endpoint.hear_verdict(verdict),
            Compared::Question(question) => {
                let said = Compared::State(question.number, endpoint.state(question.hashes));
                endpoint.post(EndpointRequest::Compare { to: from, said });
            }
        }
    }

    /// Sends on the messages that this rank relays.
    fn relay_on(&mut self) -> Result<(), TransportError> {
        let outgoing = mem::take(&mut self.relay.outgoing);
        let send = |(to, message): &(Vec<Rank>, Arc<RankMessage>)| self.transport.send(to, message);
        // One that fails keeps no other from its receiver.
        outgoing.iter().map(send).fold(Ok(()), Result::and)
    }
}

/// How a message of the comparer counts.
const BACKGROUND: Messages = Messages { data: 0, control: 0, background: 1, forwarded: 0 };
