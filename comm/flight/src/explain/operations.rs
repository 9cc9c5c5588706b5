//! Entries of all ranks, by operation.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{LastIssued, MemberFinding, Presence};
use crate::{FlightEntry, FlightRecord, FlightState, GroupId};

/// Nanoseconds since 1970, which can be compared across processes.
type UnixTime = u128;

/// Group, epoch and sequence number, which the entries of an operation have in common.
type Key = (GroupId, u64, u64);

/// The lowest number that a ring still has, by rank, group and epoch.
type Lowest = BTreeMap<(Rank, GroupId, u64), u64>;

/// The records of all ranks, and their entries by operation.
pub(super) struct Operations<'a> {
    pub(super) size: usize,
    pub(super) left_out: Vec<Rank>,
    records: BTreeMap<Rank, &'a FlightRecord>,
    lowest: Lowest,
    operations: BTreeMap<Key, Operation<'a>>,
}

/// One operation, as the ranks see it that issued it.
pub(super) struct Operation<'a> {
    key: Key,
    /// The members, in order; the issuers, if no record lists the group.
    pub(super) members: Vec<Rank>,
    /// The issuers, each with its record and its entry there.
    issued: BTreeMap<Rank, (&'a FlightRecord, &'a FlightEntry)>,
    /// The time of the first issue.
    pub(super) began: UnixTime,
}

impl Operation<'_> {
    /// Whether there is an entry of each member.
    pub(super) fn is_known(&self) -> bool {
        self.members.iter().all(|rank| self.issued.contains_key(rank))
    }

    /// The issuers, in order.
    pub(super) fn issuers(&self) -> impl Iterator<Item = (Rank, &FlightEntry)> {
        self.issued.iter().map(|(rank, (_, entry))| (*rank, *entry))
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &FlightEntry> {
        self.issuers().map(|(_, entry)| entry)
    }

    /// The entry of the first issuer.
    pub(super) fn first(&self) -> &FlightEntry {
        self.entries().next().expect("an operation has an issuer")
    }

    /// The last issuer, its entry, and the time from the median issue of the others until its own; `None` if there are no others.
    pub(super) fn last(&self) -> Option<(Rank, &FlightEntry, Duration)> {
        let issued = self.issued.iter();
        let mut times: Vec<(UnixTime, Rank, &FlightEntry)> = issued
            .map(|(rank, (record, entry))| (record.unix_ns(entry.issued_ns), *rank, *entry))
            .collect();
        times.sort_unstable_by_key(|(time, rank, _)| (*time, *rank));
        let (last, rank, entry) = times.pop()?;
        let (median, ..) = times.get(times.len().checked_sub(1)? / 2)?;
        Some((rank, entry, since(*median, last)))
    }

    /// Whether all issuers are done with it.
    pub(super) fn is_over(&self) -> bool {
        self.entries().all(|entry| entry.state == FlightState::Complete)
    }

    pub(super) fn is_waited_for(&self) -> bool {
        self.entries().any(FlightEntry::is_waited_for)
    }

    /// The time from the first wait for the operation until its issuers gave up; `None` if no rank waits.
    pub(super) fn waited(&self) -> Option<Duration> {
        let waits = self.issued.values().filter(|(_, entry)| entry.is_waited_for());
        let began = waits.filter_map(|(record, entry)| Some(record.unix_ns(entry.waited_ns?)));
        Some(since(began.min()?, self.end()))
    }

    /// The time at which the issuers gave up, or at which the last of their records was taken.
    fn end(&self) -> UnixTime {
        let ends = self.issued.values();
        let ends = ends.map(|(it, entry)| it.unix_ns(entry.settled_ns.unwrap_or(it.taken_ns)));
        ends.max().unwrap_or(0)
    }
}

impl<'a> Operations<'a> {
    pub(super) fn of(records: &'a [FlightRecord]) -> Self {
        let mut newest_first: Vec<&FlightRecord> = records.iter().collect();
        newest_first.sort_by_key(|it| (Reverse(it.unix_ns(it.taken_ns)), it.rank));
        let newest = newest_first.first().copied();
        let size = newest.map_or(0, |record| record.size);
        let is_older = |it: &FlightRecord| newest.and_then(|newest| it.time_until_world_of(newest));
        let (mut records, mut left_out) = (BTreeMap::new(), Vec::new());
        for record in newest_first {
            let is_of_the_world = record.size == size && is_older(record).is_none();
            if is_of_the_world && !records.contains_key(&record.rank) {
                records.insert(record.rank, record);
            } else {
                left_out.push(record.rank);
            }
        }
        let (lowest, operations) = by_operation(&records);
        Self { size, left_out, records, lowest, operations }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Operation<'a>> {
        self.operations.values()
    }

    pub(super) fn records(&self) -> impl Iterator<Item = &'a FlightRecord> {
        self.records.values().copied()
    }

    pub(super) fn without_record(&self) -> Vec<Rank> {
        let ranks = (0..self.size).map(Rank::new);
        ranks.filter(|rank| !self.records.contains_key(rank)).collect()
    }

    /// Whether some rank has left this operation's epoch behind: it belongs to an aborted step.
    pub(super) fn is_of_the_past(&self, operation: &Operation<'_>) -> bool {
        let (_, epoch, _) = operation.key;
        self.records().any(|record| record.epoch > epoch)
    }

    /// Whether the part of some member is unknown: its record is lost, or its ring too short.
    pub(super) fn have_lost(&self, operation: &Operation<'_>) -> bool {
        let absent = operation.members.iter().filter(|rank| !operation.issued.contains_key(rank));
        absent.into_iter().any(|rank| self.lost(operation, *rank).is_some())
    }

    /// The reason why the part of a member without an entry is unknown, if it is. FLIGHT.md.
    fn lost(&self, operation: &Operation<'_>, rank: Rank) -> Option<Presence> {
        let Some(record) = self.records.get(&rank) else { return Some(Presence::NoRecord) };
        let (group, epoch, sequence) = operation.key;
        let may_be_older = match (self.lowest.get(&(rank, group, epoch)), record.entries.first()) {
            (Some(lowest), _) => sequence < *lowest,
            (None, Some(oldest)) => operation.began < record.unix_ns(oldest.issued_ns),
            (None, None) => true,
        };
        (record.overwritten > 0 && may_be_older).then_some(Presence::Overwritten)
    }

    /// The parts of an operation's members, in order.
    pub(super) fn members(&self, operation: &Operation<'_>) -> impl Iterator<Item = MemberFinding> {
        let end = operation.end();
        operation.members.iter().map(move |rank| {
            let not_issued = || Presence::NotIssued(self.last_issued(*rank, operation, end));
            let presence = match operation.issued.get(rank) {
                Some((_, entry)) => Presence::Issued(Box::new(**entry)),
                None => self.lost(operation, *rank).unwrap_or_else(not_issued),
            };
            MemberFinding { rank: *rank, presence }
        })
    }

    /// The last operation of a rank that has not issued `operation`, seen at `end`; and the operation for which the rank waits, or
    /// waited when the world ended: not `operation`, and none of an earlier epoch.
    fn last_issued(
        &self,
        rank: Rank,
        operation: &Operation<'_>,
        end: UnixTime,
    ) -> Option<LastIssued> {
        let record = self.records.get(&rank)?;
        let last = record.entries.last()?;
        let waits = |entry: &&FlightEntry| {
            key_of(entry) != operation.key && entry.epoch == record.epoch && entry.is_waited_for()
        };
        Some(LastIssued {
            operation: Box::new(*last),
            ago: since(record.unix_ns(last.issued_ns), end),
            waits_in: record.entries.iter().find(waits).copied().map(Box::new),
        })
    }
}

/// The time from `earlier` until `later`.
fn since(earlier: UnixTime, later: UnixTime) -> Duration {
    let ns = later.saturating_sub(earlier);
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}

fn key_of(entry: &FlightEntry) -> Key {
    (entry.group, entry.epoch, entry.sequence)
}

fn by_operation<'a>(
    records: &BTreeMap<Rank, &'a FlightRecord>,
) -> (Lowest, BTreeMap<Key, Operation<'a>>) {
    let groups = records.values().flat_map(|record| &record.groups);
    let members: BTreeMap<GroupId, &[Rank]> = groups.map(|it| (it.id, &*it.ranks)).collect();
    let (mut lowest, mut operations) = (Lowest::new(), BTreeMap::new());
    for (rank, record) in records {
        for entry in &record.entries {
            let first = lowest.entry((*rank, entry.group, entry.epoch)).or_insert(entry.sequence);
            *first = entry.sequence.min(*first);
            if !meets_others(entry, &members) {
                continue;
            }
            let (key, began) = (key_of(entry), record.unix_ns(entry.issued_ns));
            let (members, issued) = (Vec::new(), BTreeMap::new());
            let new = Operation { key, members, issued, began };
            let operation = operations.entry(key).or_insert(new);
            operation.began = operation.began.min(began);
            operation.issued.entry(*rank).or_insert((*record, entry));
        }
    }
    for operation in operations.values_mut() {
        let known = members.get(&operation.key.0).map(|ranks| ranks.to_vec());
        operation.members = known.unwrap_or_else(|| operation.issued.keys().copied().collect());
    }
    (lowest, operations)
}

/// A transfer of a rank to itself has two entries of one rank, which never differ. A call that was refused because its epoch was
/// over, before it got a number, meets no other.
fn meets_others(entry: &FlightEntry, members: &BTreeMap<GroupId, &[Rank]>) -> bool {
    let to_itself = members.get(&entry.group).is_some_and(|it| it.len() == 2 && it[0] == it[1]);
    !to_itself && entry.sequence != u64::MAX
}
