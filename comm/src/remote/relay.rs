//! This rank's part in the exchanges of all ranks: it sends contributions up the tree and down again. `REMOTE.md`, "Exchanges".

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use super::buffer::BufferPool;
use super::exchanges::{ExchangeBatch, ExchangeKey, Exchanges, Forwarded};
use super::header::{DataHeader, read};
use super::message::RankMessage;
use super::transmit::{DataMessage, Payload};
use super::tree::Tree;
use crate::ledger::Messages;
use crate::{Channel, GroupId, Op, sync};

/// A last message that came so long ago is taken in without the contributions before it, if a rank leaves that sends those on.
const PATIENCE: Duration = Duration::from_secs(1);

/// The exchanges of a rank.
pub(super) struct Relay {
    pool: Arc<BufferPool>,
    pub(super) exchanges: Exchanges,
    /// Messages to be sent.
    pub(super) outgoing: Vec<(Vec<Rank>, Arc<RankMessage>)>,
    /// Of ranks, to be taken in, in order.
    pub(super) come: VecDeque<(Rank, Come)>,
    /// The group of all ranks, whose operations are exchanges.
    group: GroupId,
    /// By rank: the number of its contributions that have come.
    received: Vec<u64>,
    /// The last messages of ranks, which follow contributions that have not come, and the times at which they came.
    held_back: Vec<(Instant, Rank, RankMessage)>,
    /// By rank: whether it has said that it leaves.
    leaves: Vec<bool>,
    /// Since they were last added to the counts of the rank.
    pub(super) messages: Messages,
}

/// The contribution or the last message of a rank, as it has come.
#[derive(Debug)]
pub(super) enum Come {
    /// Its contribution to an exchange, or the problem with it.
    Forwarded(Result<DataMessage, String>),
    /// Its last message of an epoch, or of all.
    Last(RankMessage),
}

impl Relay {
    pub(super) fn new(tree: Tree) -> Self {
        let size = tree.size;
        Self {
            pool: Arc::default(),
            exchanges: Exchanges::new(tree),
            outgoing: Vec::new(),
            come: VecDeque::new(),
            group: GroupId::of(&(0..size).map(Rank::new).collect::<Vec<_>>(), Channel::Control),
            received: vec![0; size],
            held_back: Vec::new(),
            leaves: vec![false; size],
            messages: Messages::default(),
        }
    }

    /// This rank sends `message` to all others.
    pub(super) fn contribute(&mut self, key: ExchangeKey, message: &Arc<RankMessage>) {
        self.exchanges.contribute(key);
        let rank = self.exchanges.tree.rank;
        let header = message.header().into();
        let payload = Payload::part(message, 0..message.body().len());
        let own = Forwarded { rank, header, payload };
        self.send_on(ExchangeBatch { key, contributions: vec![own] });
    }

    /// Contributions have come from above or from below.
    ///
    /// # Errors
    /// The problem with the message.
    pub(super) fn receive(&mut self, from: Rank, message: RankMessage) -> Result<(), String> {
        let message = Arc::new(message);
        let tree = self.exchanges.tree;
        let batch = ExchangeBatch::read(&message, tree.size)?;
        if tree.parent() == Some(from) {
            self.receive_from_above(message, &batch);
            return Ok(());
        }
        if !tree.is_child(from) {
            return Err("it has contributions, and its sender has none for this rank".to_owned());
        }
        match batch.contributions.iter().find(|it| !tree.is_below(it.rank, from)) {
            Some(it) => {
                Err(format!("it has a contribution of rank {}, which is elsewhere", it.rank))
            }
            None => {
                self.receive_from_below(batch);
                Ok(())
            }
        }
    }

    fn receive_from_above(&mut self, message: Arc<RankMessage>, batch: &ExchangeBatch) {
        self.send_down(message);
        self.take_in(batch);
        // An early message only says which ranks are there.
        match self.exchanges.is_complete(batch.key) {
            true => self.messages.control += 1,
            false => self.messages.background += 1,
        }
    }

    /// A rank that contributes twice is told of here: later it would look as if this rank had sent it twice.
    fn receive_from_below(&mut self, mut batch: ExchangeBatch) {
        self.messages.forwarded += 1;
        let exchanges = &self.exchanges;
        let come = &mut self.come;
        let key = batch.key;
        batch.contributions.retain(|it| {
            let is_first = !exchanges.has(key, it.rank);
            if !is_first {
                let problem = format!("it contributes twice to exchange {key}");
                come.push_back((it.rank, Come::Forwarded(Err(problem))));
            }
            is_first
        });
        self.send_on(batch);
    }

    /// Sends on contributions that have waited for long enough.
    pub(super) fn look_for_overdue(&mut self) {
        if self.exchanges.holds() {
            for batch in self.exchanges.overdue(sync::now()) {
                self.send(&batch);
            }
        }
        self.release_overdue();
    }

    fn send_on(&mut self, batch: ExchangeBatch) {
        let ready = self.exchanges.take(batch, sync::now());
        for batch in ready {
            self.send(&batch);
        }
    }

    /// Sends contributions up, or down from the root.
    fn send(&mut self, batch: &ExchangeBatch) {
        // Without memory for it the contributions do not arrive, and the deadline ends the world.
        let Some(message) = batch.write(&self.pool).map(Arc::new) else { return };
        match self.exchanges.tree.parent() {
            Some(parent) => {
                match self.exchanges.is_held(batch.key) {
                    true => self.messages.background += 1,
                    false => self.messages.control += 1,
                }
                self.outgoing.push((vec![parent], message));
            }
            None => {
                self.send_down(message);
                self.take_in(batch);
            }
        }
    }

    fn send_down(&mut self, message: Arc<RankMessage>) {
        let children: Vec<_> = self.exchanges.tree.children().collect();
        self.messages.forwarded += children.len() as u64;
        if !children.is_empty() {
            self.outgoing.push((children, message));
        }
    }

    /// The contributions of the others are messages to this rank.
    fn take_in(&mut self, batch: &ExchangeBatch) {
        let own = self.exchanges.tree.rank;
        let mut encoded = None;
        let others = || batch.contributions.iter().filter(|it| it.rank != own);
        self.exchanges.attend(batch.key, others().map(|it| it.rank));
        for contribution in others() {
            let from = contribution.rank;
            self.received[from.index()] += 1;
            let message = message_in(contribution, &mut encoded);
            let message = message.and_then(|message| self.checked(batch.key, message));
            self.come.push_back((from, Come::Forwarded(message)));
            self.release(from);
        }
    }

    /// A contribution that is one to this exchange.
    fn checked(&self, key: ExchangeKey, message: DataMessage) -> Result<DataMessage, String> {
        let descriptor = &message.data_header.descriptor;
        let is_exchange = descriptor.group == self.group && descriptor.op == Op::AllGather;
        match is_exchange && ExchangeKey::from(&**descriptor) == key {
            true => Ok(message),
            false => Err(format!("it contributes to exchange {key} for {descriptor}")),
        }
    }

    /// Whether all contributions have come that a rank made before its last message.
    pub(super) fn is_in_order(&self, from: Rank, exchanged: u64) -> bool {
        self.received[from.index()] >= exchanged
    }

    /// Keeps a last message until the contributions before it have come.
    pub(super) fn hold_back(&mut self, from: Rank, message: RankMessage) {
        self.held_back.push((sync::now(), from, message));
    }

    /// A rank has said that it leaves, also where that is held back.
    pub(super) fn hear_that_leaves(&mut self, rank: Rank) {
        self.leaves[rank.index()] = true;
    }

    /// Whether a rank has said that it leaves.
    pub(super) fn leaves(&self, rank: Rank) -> bool {
        self.leaves.get(rank.index()).is_some_and(|leaves| *leaves)
    }

    /// Takes in the last messages of a rank that are in order.
    fn release(&mut self, rank: Rank) {
        let received = self.received[rank.index()];
        self.release_if(|_, from, message| from == rank && message.exchanged() <= received);
    }

    /// Takes in the last messages whose contributions do not come, because a rank that sends them on has left.
    fn release_overdue(&mut self) {
        if self.held_back.is_empty() {
            return;
        }
        let now = sync::now();
        let tree = self.exchanges.tree;
        let leaves = self.leaves.clone();
        self.release_if(|since, from, _| {
            let mut path = tree.path(from).skip(1).chain(tree.path(tree.rank).skip(1));
            now.saturating_duration_since(since) >= PATIENCE && path.any(|it| leaves[it.index()])
        });
    }

    fn release_if(&mut self, is_due: impl Fn(Instant, Rank, &RankMessage) -> bool) {
        let is_due = |(since, from, message): &mut (_, _, _)| is_due(*since, *from, message);
        let due = self.held_back.extract_if(.., is_due);
        self.come.extend(due.map(|(_, from, message)| (from, Come::Last(message))));
    }

    pub(super) fn clear(&mut self) {
        self.exchanges.clear();
        self.held_back.clear();
    }
}

/// A contribution as a part in its operation. `encoded` has the header that was read before: that of most ranks.
fn message_in(
    contribution: &Forwarded,
    encoded: &mut Option<(Arc<[u8]>, DataHeader)>,
) -> Result<DataMessage, String> {
    let Forwarded { header, payload, .. } = contribution;
    let is_known = |(known, _): &(Arc<[u8]>, _)| Arc::ptr_eq(known, header) || known == header;
    if !encoded.as_ref().is_some_and(is_known) {
        *encoded = Some((Arc::clone(header), read(header)?));
    }
    let data_header = encoded.as_ref().map(|(_, read)| read.clone()).expect("it has just been set");
    Ok(DataMessage { data_header, round: 0, payload: payload.clone() })
}

#[cfg(test)]
mod tests;
