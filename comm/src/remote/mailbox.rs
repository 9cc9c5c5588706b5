//! Where messages wait for this rank to issue their operation, or are laid into it. `REMOTE.md`, "An operation".

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::transmit::DataMessage;
use crate::Descriptor;
use crate::engine::{Key, SharedOperation};
use crate::pattern::rounds;

/// A round of an operation.
type Round = (Key, u8);

/// Data messages, by their operations.
#[derive(Default)]
pub(super) struct Mailbox {
    /// Of operations that this rank has not issued, in the order in which it came.
    early: HashMap<Round, Vec<(Rank, DataMessage)>>,
    open: BTreeMap<Round, Open>,
    /// Operations to which all have come, and which this rank is about to bring to another round.
    owed: Vec<Arc<SharedOperation>>,
}

/// An operation that this rank has issued, and of which others are missing.
pub(crate) struct Open {
    pub(super) operation: Arc<SharedOperation>,
    /// The call, as this rank describes it to the others.
    pub(super) descriptor: Arc<Descriptor>,
    round: u8,
    lay: Box<Lay>,
    /// By slot: whether its message has come.
    come: Vec<bool>,
}

/// Lays the message of the member in a slot into the operation.
pub(crate) type Lay = dyn Fn(&Arc<SharedOperation>, usize, DataMessage) + Send;

impl Mailbox {
    /// This rank has issued an operation; returns the messages that came of it before, which are to be laid there.
    pub(super) fn open(&mut self, open: Open) -> Vec<(Rank, DataMessage)> {
        let round = (open.operation.key, open.round);
        self.owed.retain(|owed| !Arc::ptr_eq(owed, &open.operation));
        self.open.insert(round, open);
        self.early.remove(&round).unwrap_or_default()
    }

    /// A message has come. It is laid into its operation, or waits for it.
    ///
    /// # Errors
    /// The problem with it.
    pub(super) fn put(&mut self, from: Rank, message: DataMessage) -> Result<(), String> {
        let round = (Key::from(&*message.data_header.descriptor), message.round);
        let Some(open) = self.open.get_mut(&round) else {
            let early = self.early.entry(round).or_default();
            if early.iter().any(|(other, _)| *other == from) {
                return Err(twice(&message));
            }
            early.push((from, message));
            return Ok(());
        };
        open.lay(from, message)?;
        if open.is_complete() {
            let complete = self.open.remove(&round);
            self.owed.extend(complete.filter(Open::goes_on).map(|open| open.operation));
        }
        Ok(())
    }

    /// The operations of which others are missing.
    pub(super) fn gathering(&self) -> impl Iterator<Item = &Open> {
        self.open.values()
    }

    /// Whether this rank owes others a round of an operation to which it has come.
    pub(super) fn owes(&mut self) -> bool {
        self.owed.retain(|owed| !owed.is_settled());
        let goes_on = |open: &Open| open.goes_on() && !open.operation.is_settled();
        !self.owed.is_empty() || self.open.values().any(goes_on)
    }

    /// Whether others are waited for.
    pub(super) fn awaits(&mut self) -> bool {
        self.open.retain(|_, open| !open.operation.is_settled());
        !self.open.is_empty()
    }

    /// Whether a thread waits for one of them: such a thread has a handle of it, beside the mailbox and the table.
    pub(super) fn is_awaited(&mut self) -> bool {
        self.awaits() && self.open.values().any(|open| Arc::strong_count(&open.operation) > 2)
    }

    /// Whether one of them may still come whose members are not all there: those that have not left.
    pub(super) fn expects(&mut self, is_there: impl Fn(Rank) -> bool) -> bool {
        self.awaits() && self.open.values().any(|open| open.missing().any(&is_there))
    }

    /// Forgets operations that have failed, and messages of epochs that have been over for long.
    pub(super) fn forget_before(&mut self, epoch: u64) {
        self.open.retain(|_, open| !open.operation.is_settled());
        self.early.retain(|(key, _), _| key.epoch >= epoch);
    }

    /// Forgets everything: the world is over.
    pub(super) fn clear(&mut self) {
        drop(mem::take(self));
    }
}

impl Open {
    pub(crate) fn new(
        operation: Arc<SharedOperation>,
        descriptor: Arc<Descriptor>,
        round: u8,
        lay: Box<Lay>,
    ) -> Self {
        let come = vec![false; operation.ranks.len()];
        Self { operation, descriptor, round, lay, come }
    }

    /// The members of which nothing has come, this rank among them. No member is missing in a later round: each has promised to come
    /// when it came to the first.
    pub(super) fn missing(&self) -> impl Iterator<Item = Rank> {
        let slots = self.operation.ranks.iter().zip(&self.come);
        let is_first = self.round == 0;
        slots.filter(move |(_, come)| is_first && !**come).map(|(rank, _)| *rank)
    }

    fn goes_on(&self) -> bool {
        self.round + 1 < rounds(self.descriptor.op)
    }

    fn lay(&mut self, from: Rank, message: DataMessage) -> Result<(), String> {
        let ranks = &self.operation.ranks;
        // In a group of all ranks, without a search.
        let own = Some(from.index()).filter(|slot| ranks.get(*slot) == Some(&from));
        let Some(slot) = own.or_else(|| ranks.iter().position(|rank| *rank == from)) else {
            let descriptor = &message.data_header.descriptor;
            return Err(format!(
                "the rank is not a member of {descriptor} ({})",
                descriptor.place()
            ));
        };
        if mem::replace(&mut self.come[slot], true) {
            return Err(twice(&message));
        }
        (self.lay)(&self.operation, slot, message);
        Ok(())
    }

    /// All but this rank have come.
    fn is_complete(&self) -> bool {
        self.come.iter().filter(|come| !**come).count() <= 1
    }
}

fn twice(message: &DataMessage) -> String {
    let descriptor = &message.data_header.descriptor;
    format!("the rank sent it twice for {descriptor} ({})", descriptor.place())
}
