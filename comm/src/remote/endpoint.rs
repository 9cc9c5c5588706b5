//! A rank's side of the communication with ranks that share no memory with it: its requests, and
//! the thread that sends and receives. `REMOTE.md`, "Progress".

mod closing;
mod ends;
mod greeting;
mod progress_thread;
mod reports;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io, mem};

use hsdp_sharding::{DType, Rank};

use self::closing::LastWord;
use self::greeting::Greeting;
use self::reports::Reports;
use super::buffer::BufferPool;
use super::comparer::{Compared, Hashes};
use super::drain::{Calls, Drains};
use super::ending::WorldEnding;
use super::exchanges::ExchangeKey;
use super::header::{self, end_bytes};
use super::hello::Asked;
use super::mailbox::Open;
use super::message::{MOST_STATEMENT, MessageKind, RankMessage};
use super::outgoing::Outgoing;
use super::progress::{Progress, ProgressTurn};
use super::transport::Transport;
use crate::engine::WorldState;
use crate::engine::judge::RankState;
use crate::sync::thread::{Builder, JoinHandle};
use crate::sync::{self, Condvar, Mutex, MutexGuard};
use crate::{Channel, Descriptor, Error, GroupId, Op};

/// A request to the progress engine.
pub(crate) enum EndpointRequest {
    /// Send a message.
    Send { to: Vec<Rank>, message: Arc<RankMessage> },
    /// Send a message to all other ranks, together with theirs.
    Exchange { key: ExchangeKey, message: Arc<RankMessage> },
    /// Tell a rank something, of this rank's comparer or to it. The rank may be this one.
    Compare { to: Rank, said: Compared },
    /// Lay the messages of an operation into its slots.
    Open(Open),
}

/// A rank's dealings with the others.
pub(crate) struct Endpoint {
    pub(super) rank: Rank,
    size: usize,
    pub(super) state: Arc<WorldState>,
    pub(crate) pool: Arc<BufferPool>,
    outgoing: Mutex<Outgoing>,
    /// Rung when there is something to be done.
    changed: Condvar,
    /// One thread at a time holds it, sends and receives.
    progress: Mutex<Progress>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The hellos of all processes of the job, as far as they are known here.
    greeting: Mutex<Greeting>,
    ending: Mutex<WorldEnding>,
    reports: Mutex<Reports>,
    /// The calls of NCCL that other ranks made in epochs that are over.
    drains: Mutex<Drains>,
    /// The group of all ranks on the control channel, whose small all-gathers are exchanges.
    exchanging: GroupId,
}

/// The longest that the progress engine sleeps while something is under way; and while nothing is.
const NAPS: [Duration; 2] = [Duration::from_micros(400), Duration::from_millis(5)];

/// The first of the naps, which grow.
const FIRST_NAP: Duration = Duration::from_micros(20);

/// Maximum number of bytes in the elements that the descriptor of an exchange counts.
const MOST_EXCHANGED: usize = 16 << 10;

/// How long a rank that has left receives messages for operations that it has issued.
const LINGERING: Duration = Duration::from_secs(1);

impl Endpoint {
    /// The endpoint of a world, whose progress has no thread yet.
    pub(crate) fn new(
        state: &Arc<WorldState>,
        rank: Rank,
        asked: Asked,
        transport: Box<dyn Transport>,
    ) -> Arc<Self> {
        let size = state.records.len();
        let all: Vec<_> = (0..size).map(Rank::new).collect();
        let endpoint = Arc::new(Self {
            rank,
            size,
            state: Arc::clone(state),
            pool: Arc::default(),
            outgoing: Mutex::default(),
            changed: Condvar::new(),
            progress: Mutex::new(Progress::new(rank, size, transport)),
            thread: Mutex::new(None),
            greeting: Mutex::new(Greeting::of(asked.processes)),
            ending: Mutex::default(),
            reports: Mutex::default(),
            drains: Mutex::default(),
            exchanging: GroupId::of(&all, Channel::Control),
        });
        endpoint.introduce(asked);
        endpoint
    }

    /// Starts the progress engine's thread.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let own = Arc::clone(self);
        let run = move || {
            let LastWord(own) = &LastWord(own);
            own.run();
        };
        let thread = Builder::new().name("hsdp-progress".to_owned()).spawn(run)?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    pub(crate) fn post(&self, request: EndpointRequest) {
        self.change(|outgoing| outgoing.requests.push_back(request));
    }

    /// Posts requests that the progress engine carries out in one turn, before it receives.
    pub(crate) fn post_all(&self, requests: Vec<EndpointRequest>) {
        self.change(|outgoing| outgoing.requests.extend(requests));
    }

    /// Changes the requests, and wakes the progress thread for it.
    fn change<T>(&self, change: impl FnOnce(&mut Outgoing) -> T) -> T {
        let changed = change(&mut self.outgoing.lock());
        self.changed.notify_all();
        changed
    }

    /// Sends the contribution of this rank to an operation and opens it, unless this rank has said
    /// that it brings nothing more to the epoch: one of the two comes first, and the others see the
    /// same.
    pub(crate) fn commit(
        &self,
        descriptor: &Descriptor,
        messages: Vec<EndpointRequest>,
        open: EndpointRequest,
    ) -> Result<(), Error> {
        let exchange = self.exchanged(descriptor, &messages);
        self.change(|outgoing| {
            if let Some(end) = outgoing.stopped_in(descriptor.epoch) {
                return Err(end.clone());
            }
            outgoing.issued.note(descriptor);
            outgoing.exchanged += u64::from(exchange.is_some());
            match exchange {
                Some(exchange) => outgoing.requests.push_back(exchange),
                None => outgoing.requests.extend(messages),
            }
            outgoing.requests.push_back(open);
            Ok(())
        })
    }

    /// An all-gather of all ranks goes as an exchange, if it is small: two messages a rank,
    /// whatever the number of ranks.
    fn exchanged(
        &self,
        descriptor: &Descriptor,
        messages: &[EndpointRequest],
    ) -> Option<EndpointRequest> {
        let [EndpointRequest::Send { message, .. }] = messages else { return None };
        // All members describe as many elements, though a part may have fewer.
        let size = descriptor.dtype.map_or(0, DType::size_bytes);
        let bytes = descriptor.counts.total().saturating_mul(size);
        let is_one = descriptor.op == Op::AllGather
            && descriptor.group == self.exchanging
            && bytes <= MOST_EXCHANGED;
        let key = ExchangeKey::from(descriptor);
        is_one.then(|| EndpointRequest::Exchange { key, message: Arc::clone(message) })
    }

    /// This rank brings nothing more to `epoch`. The others are told, once, unless the world is
    /// over: they would take that for an end of the step alone.
    pub(crate) fn end_epoch(&self, epoch: u64, error: Error) {
        let end = self.state.early_ends.end_epoch(epoch, error);
        if self.state.early_ends.check_world().is_err() {
            return;
        }
        self.change(|outgoing| {
            if outgoing.stopped_in(epoch).is_none() {
                let header = end_bytes(epoch, &end, self.rank);
                let to = self.others(0..self.size);
                let stop = self.message(MessageKind::Stop, outgoing.exchanged, &header, to);
                outgoing.requests.extend(stop);
                outgoing.stopped = Some((epoch, end));
            }
        });
    }

    /// A message without elements; none where there is no memory even for that. A last message, of
    /// an epoch or of all, follows so many exchanges.
    fn message(
        &self,
        kind: MessageKind,
        exchanged: u64,
        header: &[u8],
        to: Vec<Rank>,
    ) -> Option<EndpointRequest> {
        let message = RankMessage::write(&self.pool, kind, 0, header, 0)?.after(exchanged);
        Some(EndpointRequest::Send { to, message: Arc::new(message) })
    }

    /// Sends a message without elements. Where there is no memory for it, the deadline of its
    /// receivers ends the world.
    fn send(&self, kind: MessageKind, header: &[u8], to: Vec<Rank>) {
        let message = self.message(kind, 0, header, to);
        message.into_iter().for_each(|message| self.post(message));
    }

    fn others(&self, processes: Range<usize>) -> Vec<Rank> {
        processes.map(Rank::new).filter(|rank| *rank != self.rank).collect()
    }

    /// This rank goes: the others are told when it has sent the messages that it owes them.
    pub(crate) fn leave(&self) {
        self.change(|outgoing| {
            outgoing.left.get_or_insert_with(sync::now);
            outgoing.is_called = true;
        });
    }

    /// An operation has its number, and no message.
    pub(crate) fn note(&self, descriptor: &Descriptor) {
        self.outgoing.lock().issued.note(descriptor);
    }

    /// Tells `peers` which calls of NCCL this rank made until the end of an epoch.
    pub(crate) fn tell_calls(&self, epoch: u64, calls: &Calls, peers: Vec<Rank>) {
        self.send(MessageKind::Drain, &header::bytes(&(epoch, calls)), peers);
    }

    /// The calls of NCCL that others made.
    pub(crate) fn drains(&self) -> MutexGuard<'_, Drains> {
        self.drains.lock()
    }

    /// Sends and receives, unless another thread does; whether there was anything.
    pub(crate) fn hear(&self) -> bool {
        let Some(mut progress) = self.progress.try_lock() else { return false };
        progress.turn(self) == ProgressTurn::Something
    }

    /// The requests, in order.
    pub(super) fn requests(&self) -> VecDeque<EndpointRequest> {
        mem::take(&mut self.outgoing.lock().requests)
    }

    /// Tells the others that this rank has left, if it has, and owes them nothing: once.
    pub(super) fn farewell(&self) {
        if !self.is_leaving() {
            return;
        }
        let state = self.last_state();
        let processes = self.greeting.lock().hellos.len();
        let mut outgoing = self.outgoing.lock();
        if !outgoing.has_said_so && outgoing.requests.is_empty() {
            outgoing.has_said_so = true;
            // Also to processes beyond the ranks, which get no contributions: one that still
            // compares would say that this process is gone.
            for (to, exchanged) in [(0..self.size, outgoing.exchanged), (self.size..processes, 0)] {
                let to = Some(self.others(to)).filter(|to| !to.is_empty());
                let left = to.and_then(|to| self.message(MessageKind::Left, exchanged, &state, to));
                outgoing.requests.extend(left);
            }
        }
    }

    /// The state of this rank when it leaves: it waits for nothing more.
    fn last_state(&self) -> Vec<u8> {
        let state = RankState { waits: Vec::new(), ..self.state(Hashes::Last) };
        let encoded = header::bytes(&state);
        if encoded.len() <= MOST_STATEMENT {
            return encoded;
        }
        let RankState { step, epoch, given_up, has_left, .. } = state;
        header::bytes(&RankState { step, epoch, given_up, has_left, ..RankState::default() })
    }

    /// Whether this rank is leaving.
    pub(super) fn is_leaving(&self) -> bool {
        self.outgoing.lock().left.is_some()
    }

    /// Whether this rank has just left.
    pub(super) fn lingers(&self) -> bool {
        self.outgoing.lock().left.is_some_and(|left| left.elapsed() < LINGERING)
    }

    fn has_given_up(&self) -> bool {
        self.outgoing.lock().gives_up.is_some_and(|moment| sync::now() >= moment)
    }

    fn is_closed(&self) -> bool {
        let outgoing = self.outgoing.lock();
        outgoing.has_said_so && outgoing.requests.is_empty()
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint(rank {} of {})", self.rank, self.size)
    }
}
