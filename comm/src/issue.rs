//! The way of a group's calls: they get numbers, are noted, and go to the backend that serves them.

use std::borrow::Cow;
use std::sync::Arc;

use hsdp_flight::{EntryNumber, FlightState};
use hsdp_kernels::Element;
use hsdp_sharding::{ByteCount, Rank};

use crate::apart::Execution;
use crate::call::{Described, GroupCall};
use crate::engine::Record;
use crate::execute::{At, Contribute, Meter, Vectors, Work};
use crate::handle::Backend;
use crate::injection::{HowIssued, Injected};
use crate::pattern::Pattern;
use crate::site::Site;
use crate::sync::atomic::AtomicUsize;
use crate::threads::{InBlock, MemberCall, Ticket};
use crate::{CallError, Channel, Descriptor, Error, Group, Op, Pending, Tag};

/// The most bytes for which a group of one is done in less time than it takes to note the time:
/// some ten microseconds.
const QUICK_BYTES: usize = 32 << 10;

impl Group {
    /// Issues an operation of all members. Each member makes its result of its own output, which
    /// may say that it failed.
    pub(crate) fn issue<D, O>(&self, call: GroupCall, own: D) -> Result<Pending<O>, Error>
    where
        D: Contribute,
        O: TryFrom<D::Gets>,
        Error: From<O::Error>,
    {
        self.issue_or(call, own, |member, described, own| {
            Ok(Pending::issued::<D::Gets>(Execution::begin(member, described, own)?))
        })
    }

    pub(crate) fn apart(&self, op: Op) -> Error {
        self.refused(op, "its members share no memory".to_owned())
    }

    /// Issues an operation; where members share no memory, `issue_apart` does.
    pub(crate) fn issue_or<D, O>(
        &self,
        call: GroupCall,
        mut own: D,
        issue_apart: impl FnOnce(MemberCall<'_>, Described, D) -> Result<Pending<O>, Error>,
    ) -> Result<Pending<O>, Error>
    where
        D: Contribute,
        O: TryFrom<D::Gets>,
        Error: From<O::Error>,
    {
        let site = self.site_of(call.op)?;
        let (described, entry) = self.enter(&site, call, &mut own)?;
        let at = At { actual: described.actual(), ranks: &site.ranks, slot: site.slot, round: 0 };
        let alone = |own: D| Ok::<_, Error>(Pending::ready(own.alone(at).try_into()?));
        let Some(entry) = entry else { return alone(own) };
        if site.ranks.len() == 1 {
            let output = self.alone(&described.compared, entry, own, at)?;
            return Ok(Pending::ready(output.try_into()?));
        }
        let op = described.compared.op;
        let handle = &**self.handle();
        let member = MemberCall { own: &handle.own, site: &site, entry };
        let pending = if handle.backend == Backend::Counting {
            self.count_alone(op, own.pattern(at.pattern()).received(), entry);
            alone(own)?
        } else if handle.endpoint().is_some() {
            issue_apart(member, described, own)?
        } else {
            Pending::issued::<D::Gets>(meet(member, described, own)?)
        };
        handle.own.record.ledger.call(site.channel, op);
        Ok(pending)
    }

    /// Issues this member's half of a transfer between two: `slot` 0 gives, `slot` 1 takes. `None`
    /// where there is no other member to meet.
    pub(crate) fn transfer<T: Element>(
        &self,
        call: GroupCall,
        ranks: [Rank; 2],
        mut own: Vectors<T>,
    ) -> Result<Option<Ticket>, Error> {
        let slot = usize::from(call.op == Op::Recv);
        let site = self.pair(ranks, slot);
        let absent = self.absent_at(&site);
        if !absent.is_empty() {
            return Err(CallError::Absent { op: call.op, rank: self.rank(), absent }.into());
        }
        let (described, Some(entry)) = self.enter(&site, call, &mut own)? else {
            return Ok(None);
        };
        let op = described.compared.op;
        let is_between_two = ranks[0] != ranks[1];
        let handle = &**self.handle();
        let member = MemberCall { own: &handle.own, site: &site, entry };
        let ticket = if handle.backend == Backend::Counting {
            let pattern = Pattern::of(described.actual(), &site.ranks, slot);
            let received = if is_between_two { pattern.received() } else { ByteCount::ZERO };
            self.count_alone(op, received, entry);
            None
        } else if is_between_two && handle.endpoint().is_some() {
            Some(Execution::begin(member, described, own)?)
        } else {
            Some(meet(member, described, own)?)
        };
        if is_between_two {
            handle.own.record.ledger.call(site.channel, op);
        }
        Ok(ticket)
    }

    /// Counts what a rank without peers would have received.
    fn count_alone(&self, op: Op, received: ByteCount, entry: EntryNumber) {
        let Record { ledger, flight, .. } = &*self.handle().own.record;
        ledger.received(self.channel(), op, received);
        flight.settle(entry, FlightState::Complete);
    }

    /// The site of an operation of all members: of a barrier of users, the members that have data.
    fn site_of(&self, op: Op) -> Result<Cow<'_, Site>, Error> {
        let absent = self.absent_at(self.site());
        let rank = self.rank();
        if absent.is_empty() {
            return Ok(Cow::Borrowed(self.site()));
        }
        if op == Op::Barrier && !absent.contains(&rank) {
            return Ok(Cow::Owned(self.without(&absent)));
        }
        Err(CallError::Absent { op, rank, absent }.into())
    }

    /// The ranks at the site that have no data, and this rank if it has none; no rank, if the call
    /// is not of users.
    fn absent_at(&self, site: &Site) -> Vec<Rank> {
        if site.channel != Channel::User {
            return Vec::new();
        }
        let concerns = |absent: &&Rank| **absent == self.rank() || site.ranks.contains(absent);
        let absent = Arc::clone(&self.handle().absent.lock());
        absent.iter().filter(concerns).copied().collect()
    }

    /// Gives a call its number, when the rank has committed the faults that are due at it; no entry
    /// if it skips the call.
    fn enter<D: Contribute>(
        &self,
        site: &Site,
        call: GroupCall,
        contribution: &mut D,
    ) -> Result<(Described, Option<EntryNumber>), Error> {
        let gradients = contribution.gradients();
        let Injected { call, actual, how } = self.handle().inject(site, call, gradients)?;
        if matches!(how, HowIssued::AfterBarrier) {
            self.extra_barrier(site, call.tag)?;
        }
        let Site { id, channel, .. } = *site;
        let (compared, entry) = match how {
            HowIssued::Skipped => (Arc::new(call.described(id, channel, 0, 0)), None),
            _ => {
                self.handle().enter(site, call).map(|(compared, entry)| (compared, Some(entry)))?
            }
        };
        let Descriptor { epoch, sequence, .. } = *compared;
        let actual = actual.map(|it| Arc::new(it.described(id, channel, epoch, sequence)));
        Ok((Described { compared, actual }, entry))
    }

    /// The barrier of a fault, for which no thread waits.
    fn extra_barrier(&self, site: &Site, tag: Tag) -> Result<(), Error> {
        let own = &self.handle().own;
        let (compared, entry) = self.handle().enter(site, GroupCall::new(Op::Barrier, tag))?;
        let member = MemberCall { own, site, entry };
        let described = Described { compared, actual: None };
        let _ticket = match own.endpoint() {
            None => meet(member, described, Vectors::<f32>::nothing())?,
            Some(_) => Execution::begin(member, described, Vectors::<f32>::nothing())?,
        };
        self.handle().own.record.ledger.call(site.channel, Op::Barrier);
        Ok(())
    }

    /// Does an operation of a group of one before the call returns. It counts nothing.
    fn alone<D: Contribute>(
        &self,
        descriptor: &Descriptor,
        entry: EntryNumber,
        own: D,
        at: At<'_>,
    ) -> Result<D::Gets, Error> {
        let flight = &self.handle().own.record.flight;
        let mut all = vec![own];
        let work = D::introduce(&mut all).and_then(|()| D::assemble(all, at));
        let work = work.map_err(|expected| {
            flight.settle(entry, FlightState::Failed);
            self.bad_count(descriptor.op, "a group of one", descriptor.counts.total(), expected)
        })?;
        let is_quick = work.bytes() <= QUICK_BYTES && !work.calls_users();
        let output = self.run_alone(work);
        match is_quick {
            true => flight.settle_at_once(entry, FlightState::Complete),
            false => flight.settle(entry, FlightState::Complete),
        }
        Ok(output)
    }

    pub(crate) fn run_alone<W: Work>(&self, work: W) -> W::Gets {
        let ranks = [self.rank()];
        let readers = [AtomicUsize::new(0)];
        let meter = Meter::new(&ranks, &readers);
        let in_block = InBlock::enter();
        (0..work.blocks()).for_each(|block| work.run(block, &meter));
        drop(in_block);
        work.finish().take(0).expect("a group of one has one output")
    }
}

/// Has a member come to an operation whose members share memory. The last one counts the bytes that
/// each receives from the others.
fn meet<D: Contribute>(
    member: MemberCall<'_>,
    described: Described,
    own: D,
) -> Result<Ticket, Error> {
    let MemberCall { own: rank, site, .. } = member;
    let core = &rank.core;
    let Described { compared, actual } = described;
    let Descriptor { channel, op, .. } = *compared;
    // Elements that are sent count where they arrive.
    let op = if op == Op::Send { Op::Recv } else { op };
    core.submit(member, compared, own, |mut contributions: Vec<D>, compared| {
        let actual = actual.as_deref().unwrap_or(compared);
        let at = At { actual, ranks: &site.ranks, slot: site.slot, round: 0 };
        D::introduce(&mut contributions)?;
        // A rank that sends to itself receives nothing.
        let is_between_ranks = at.ranks.first() != at.ranks.last();
        let plain = at.pattern();
        let mut most = ByteCount::ZERO;
        for (slot, contribution) in contributions.iter().enumerate() {
            let received = contribution.pattern(plain.at(slot)).received();
            most = most.max(received);
            // Members that get nothing are left alone: each has its ledger in its own cache.
            if is_between_ranks && received > ByteCount::ZERO {
                core.state.record(at.ranks[slot]).ledger.received(channel, op, received);
            }
        }
        let work = D::assemble(contributions, at)?;
        Ok((work, core.carry(compared, most)))
    })
}
