//! An ordered set of ranks that issue operations together.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use hsdp_sharding::{ByteCount, Rank};

use crate::call::Call;
use crate::local::{InBlock, Member, Ticket};
use crate::seat::{Flavour, Seat, Sequence};
use crate::sync::atomic::AtomicUsize;
use crate::work::{Meter, Work};
use crate::{Channel, Descriptor, Error, GroupId, Op, Pending};

/// An ordered set of ranks, on one channel, and this rank's place in it.
///
/// Every member issues the same operations in the same order: the n-th call of one meets the n-th call
/// of the others. A call returns at once, with a [`Pending`]; it never waits for another member. Handles of one
/// group may be used from several threads of a rank, but then it is the caller who keeps the order.
#[derive(Clone)]
pub struct Group {
    seat: Arc<Seat>,
    id: GroupId,
    channel: Channel,
    ranks: Arc<[Rank]>,
    index: usize,
    sequence: Arc<Sequence>,
}

impl Group {
    pub(crate) fn new(seat: &Arc<Seat>, ranks: &[Rank], channel: Channel) -> Result<Self, Error> {
        let refuse = |problem| Error::BadGroup {
            rank: seat.rank,
            size: seat.size,
            ranks: ranks.iter().map(|rank| rank.get()).collect(),
            problem,
        };
        if ranks.iter().any(|rank| rank.index() >= seat.size) {
            return Err(refuse("a member is not in the world"));
        }
        let mut seen = HashSet::with_capacity(ranks.len());
        if !ranks.iter().all(|rank| seen.insert(*rank)) {
            return Err(refuse("a member is listed twice"));
        }
        let index = ranks.iter().position(|rank| *rank == seat.rank);
        let index = index.ok_or_else(|| refuse("this rank is not among its members"))?;
        Ok(Self::at(seat, ranks.into(), channel, index))
    }

    pub(crate) fn of_all(seat: &Arc<Seat>, channel: Channel) -> Self {
        let ranks = (0..seat.size).map(Rank::new).collect();
        Self::at(seat, ranks, channel, seat.rank.index())
    }

    fn at(seat: &Arc<Seat>, ranks: Arc<[Rank]>, channel: Channel, index: usize) -> Self {
        let id = GroupId::of(&ranks, channel);
        Self {
            seat: Arc::clone(seat),
            id,
            channel,
            ranks,
            index,
            sequence: seat.sequence(id, index),
        }
    }

    /// Which rank this is.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.seat.rank
    }

    /// Its members, in order.
    #[must_use]
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// How many members it has.
    #[must_use]
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The place of this rank among them: its slot in the group's operations.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Its channel.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel
    }

    /// Its identity, which all members share.
    #[must_use]
    pub fn id(&self) -> GroupId {
        self.id
    }

    /// The rank of a member.
    ///
    /// # Errors
    /// [`Error::BadMember`] if there is no such member.
    pub(crate) fn member(&self, op: Op, what: &'static str, index: usize) -> Result<Rank, Error> {
        let missing =
            Error::BadMember { op, rank: self.rank(), what, member: index, members: self.size() };
        self.ranks.get(index).copied().ok_or(missing)
    }

    pub(crate) fn bad_count(&self, op: Op, what: &str, found: usize, expected: String) -> Error {
        Error::BadCount { op, rank: self.rank(), what: what.to_owned(), found, expected }
    }

    /// Issues an operation of all members.
    ///
    /// `assemble` makes the work of their deposits, in member order; it is the last one's that is called. `imagine`
    /// says what a rank without peers would have received, in bytes, and what it gets.
    pub(crate) fn issue<D, W>(
        &self,
        call: Call,
        deposit: D,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
        imagine: impl FnOnce(D) -> (usize, W::Output),
    ) -> Result<Pending<W::Output>, Error>
    where
        D: Send + 'static,
        W: Work + 'static,
    {
        let descriptor = self.seat.enter(self.id, self.channel, &self.sequence, call)?;
        if self.size() == 1 {
            return self.alone(&descriptor, deposit, assemble);
        }
        let op = descriptor.op;
        let ledger = &self.seat.record.ledger;
        let pending = match &self.seat.flavour {
            Flavour::Local(lifeline) => {
                let (ranks, slot) = (Arc::clone(&self.ranks), self.index);
                let member = Member { rank: self.rank(), ranks, slot };
                let ticket = lifeline.core().submit(member, descriptor, deposit, assemble)?;
                Pending::issued(ticket)
            }
            Flavour::Counting => {
                let (bytes, output) = imagine(deposit);
                ledger.received(self.channel, op, ByteCount::of(bytes));
                Pending::ready(output)
            }
        };
        ledger.call(self.channel, op);
        Ok(pending)
    }

    /// Issues this member's half of a transfer between two: `slot` 0 gives, `slot` 1 takes.
    pub(crate) fn transfer<W: Work + 'static, D: Send + 'static>(
        &self,
        call: Call,
        ranks: [Rank; 2],
        deposit: D,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
    ) -> Result<Option<Ticket>, Error> {
        let [from, to] = ranks;
        let id = self.id.pair(from, to);
        let slot = usize::from(call.op == Op::Recv);
        let descriptor = self.seat.enter(id, self.channel, &self.seat.sequence(id, slot), call)?;
        let op = descriptor.op;
        let ticket = match &self.seat.flavour {
            Flavour::Local(lifeline) => {
                let member = Member { rank: self.rank(), ranks: Arc::new(ranks), slot };
                Some(lifeline.core().submit(member, descriptor, deposit, assemble)?)
            }
            Flavour::Counting => None,
        };
        if from != to {
            self.seat.record.ledger.call(self.channel, op);
        }
        Ok(ticket)
    }

    /// What a rank that is not there would have sent: it counts, and nothing comes.
    pub(crate) fn imagine_received(&self, op: Op, bytes: usize) {
        self.seat.record.ledger.received(self.channel, op, ByteCount::of(bytes));
    }

    /// An operation of a group of one: it is done before the call returns, and counts nothing.
    fn alone<D, W: Work>(
        &self,
        descriptor: &Descriptor,
        deposit: D,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
    ) -> Result<Pending<W::Output>, Error> {
        let work = assemble(vec![deposit]).map_err(|expected| Error::BadCount {
            op: descriptor.op,
            rank: self.rank(),
            what: "a group of one".to_owned(),
            found: descriptor.counts.total(),
            expected,
        })?;
        let readers = [AtomicUsize::new(0)];
        let meter = Meter::new(&[], &self.ranks, descriptor, &readers);
        let in_block = InBlock::enter();
        (0..work.blocks()).for_each(|block| work.run(block, &meter));
        drop(in_block);
        let output = work.finish().pop().expect("a group of one has one output");
        Ok(Pending::ready(output))
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank())
            .field("channel", &self.channel)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}
