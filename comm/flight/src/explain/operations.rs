//! Entries of all ranks, by operation.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{LastIssued, MemberFinding, Presence, WorldEnd};
use crate::{FlightEntry, FlightRecord, FlightState, GroupId};

/// Nanoseconds since 1970, which can be compared across processes.
pub(super) type Moment = u128;

/// Group, epoch and sequence number, which the entries of an operation have in common.
type Key = (GroupId, u64, u64);

/// The records of all ranks, and their entries by operation.
pub(super) struct Operations<'a> {
    pub(super) size: usize,
    pub(super) left_out: Vec<Rank>,
    timelines: BTreeMap<Rank, Timeline<'a>>,
    operations: BTreeMap<Key, Operation<'a>>,
}

/// One operation, as the ranks see it that issued it.
pub(super) struct Operation<'a> {
    key: Key,
    /// The members, in order; the issuers, if no record lists the group.
    pub(super) members: Vec<Rank>,
    /// The issuers, each with its entry and the time of its issue.
    issued: BTreeMap<Rank, (&'a FlightEntry, Moment)>,
    /// The first of these times.
    pub(super) began: Moment,
}

/// One rank's record.
struct Timeline<'a> {
    record: &'a FlightRecord,
    /// The lowest number that the ring still has, by group and epoch.
    lowest: BTreeMap<(GroupId, u64), u64>,
}

impl Operation<'_> {
    /// Whether there is an entry of each member.
    pub(super) fn is_known(&self) -> bool {
        self.members.iter().all(|rank| self.issued.contains_key(rank))
    }

    /// The issuers, in order.
    pub(super) fn issuers(&self) -> impl Iterator<Item = (Rank, &FlightEntry)> {
        self.issued.iter().map(|(rank, (entry, _))| (*rank, *entry))
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &FlightEntry> {
        self.issued.values().map(|(entry, _)| *entry)
    }

    /// The entry of the first issuer.
    pub(super) fn first(&self) -> &FlightEntry {
        self.entries().next().expect("an operation has an issuer")
    }

    /// The last issuer, its entry, and the time from the median issue of the others until its own; `None` if there are no others.
    pub(super) fn last(&self) -> Option<(Rank, &FlightEntry, Duration)> {
        let moment = |(rank, (entry, moment)): (&Rank, &(_, _))| (*moment, *rank, *entry);
        let mut moments: Vec<(Moment, Rank, &FlightEntry)> =
            self.issued.iter().map(moment).collect();
        moments.sort_unstable_by_key(|(moment, rank, _)| (*moment, *rank));
        let (last, rank, entry) = moments.pop()?;
        let (median, ..) = moments.get(moments.len().checked_sub(1)? / 2)?;
        Some((rank, entry, since(*median, last)))
    }

    /// Whether all issuers are done with it.
    pub(super) fn is_over(&self) -> bool {
        self.entries().all(|entry| entry.state == FlightState::Complete)
    }

    pub(super) fn is_waited_for(&self) -> bool {
        self.entries().any(FlightEntry::is_waited_for)
    }
}

impl<'a> Timeline<'a> {
    fn of(record: &'a FlightRecord) -> Self {
        let mut lowest = BTreeMap::new();
        for entry in &record.entries {
            let first = lowest.entry((entry.group, entry.epoch)).or_insert(entry.sequence);
            *first = entry.sequence.min(*first);
        }
        Self { record, lowest }
    }

    /// Whether the ring may have had an entry of `operation`, which it does not have now. FLIGHT.md.
    fn may_have_overwritten(&self, operation: &Operation<'_>) -> bool {
        let (group, epoch, sequence) = operation.key;
        let oldest = self.record.entries.first();
        self.record.overwritten > 0
            && match (self.lowest.get(&(group, epoch)), oldest) {
                (Some(lowest), _) => sequence < *lowest,
                (None, Some(oldest)) => operation.began < moment(self.record, oldest.issued_ns),
                (None, None) => true,
            }
    }
}

impl<'a> Operations<'a> {
    pub(super) fn of(records: &'a [FlightRecord]) -> Self {
        let mut newest_first: Vec<&FlightRecord> = records.iter().collect();
        newest_first.sort_by_key(|it| (Reverse(moment(it, it.taken_ns)), it.rank));
        let size = newest_first.first().map_or(0, |record| record.size);
        let (mut timelines, mut left_out) = (BTreeMap::new(), Vec::new());
        for record in newest_first {
            if record.size == size && !timelines.contains_key(&record.rank) {
                timelines.insert(record.rank, Timeline::of(record));
            } else {
                left_out.push(record.rank);
            }
        }
        let operations = by_operation(&timelines);
        Self { size, left_out, timelines, operations }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Operation<'a>> {
        self.operations.values()
    }

    pub(super) fn without_record(&self) -> Vec<Rank> {
        let ranks = (0..self.size).map(Rank::new);
        ranks.filter(|rank| !self.timelines.contains_key(rank)).collect()
    }

    pub(super) fn overwritten(&self) -> Vec<(Rank, u64)> {
        let counts = self.records().map(|record| (record.rank, record.overwritten));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    pub(super) fn ends(&self) -> Vec<WorldEnd> {
        let mut ends: Vec<WorldEnd> = Vec::new();
        for record in self.records() {
            let Some(text) = &record.end else { continue };
            match ends.iter_mut().find(|end| end.text == *text) {
                Some(end) => end.ranks.push(record.rank),
                None => ends.push(WorldEnd { text: text.clone(), ranks: vec![record.rank] }),
            }
        }
        ends
    }

    fn records(&self) -> impl Iterator<Item = &'a FlightRecord> {
        self.timelines.values().map(|timeline| timeline.record)
    }

    /// Whether the part of some member is unknown: its record is lost, or its ring too short.
    pub(super) fn have_lost(&self, operation: &Operation<'_>) -> bool {
        let lost = |rank: &Rank| match self.timelines.get(rank) {
            Some(timeline) => timeline.may_have_overwritten(operation),
            None => true,
        };
        operation.members.iter().any(|rank| !operation.issued.contains_key(rank) && lost(rank))
    }

    pub(super) fn world_has_ended(&self) -> bool {
        self.records().any(|record| record.end.is_some())
    }

    /// Whether some rank has left this operation's epoch behind: it belongs to an aborted step.
    pub(super) fn is_of_the_past(&self, operation: &Operation<'_>) -> bool {
        let (_, epoch, _) = operation.key;
        self.records().any(|record| record.epoch > epoch)
    }

    /// The time from the first wait for an operation until its issuers gave up; `None` if no rank waits.
    pub(super) fn waited(&self, operation: &Operation<'_>) -> Option<Duration> {
        let waits = operation.issuers().filter(|(_, entry)| entry.is_waited_for());
        let began = waits.filter_map(|(rank, entry)| {
            Some(moment(self.timelines.get(&rank)?.record, entry.waited_ns?))
        });
        Some(since(began.min()?, self.end_of(operation)))
    }

    /// The time at which the issuers of an operation gave up, or at which the last of their records was taken.
    fn end_of(&self, operation: &Operation<'_>) -> Moment {
        let last = |(rank, entry): (Rank, &FlightEntry)| {
            let record = self.timelines.get(&rank)?.record;
            Some(moment(record, entry.settled_ns.unwrap_or(record.taken_ns)))
        };
        operation.issuers().filter_map(last).max().unwrap_or(0)
    }

    /// The parts of an operation's members, in order.
    pub(super) fn members(&self, operation: &Operation<'_>) -> impl Iterator<Item = MemberFinding> {
        let end = self.end_of(operation);
        operation.members.iter().map(move |rank| {
            let presence = match (operation.issued.get(rank), self.timelines.get(rank)) {
                (Some((entry, _)), _) => Presence::Issued(Box::new(**entry)),
                (None, None) => Presence::NoRecord,
                (None, Some(timeline)) if timeline.may_have_overwritten(operation) => {
                    Presence::Overwritten
                }
                (None, Some(timeline)) => {
                    Presence::NotIssued(last_issued(timeline.record, operation, end))
                }
            };
            MemberFinding { rank: *rank, presence }
        })
    }
}

/// The last operation of a rank that has not issued `operation`, seen at `end`; and the operation for which the rank waits, or waited
/// when the world ended: not `operation`, and none of an earlier epoch.
fn last_issued(
    record: &FlightRecord,
    operation: &Operation<'_>,
    end: Moment,
) -> Option<LastIssued> {
    let last = record.entries.last()?;
    let waits = |entry: &&FlightEntry| {
        key_of(entry) != operation.key && entry.epoch == record.epoch && entry.is_waited_for()
    };
    Some(LastIssued {
        operation: Box::new(*last),
        ago: since(moment(record, last.issued_ns), end),
        waits_in: record.entries.iter().find(waits).copied().map(Box::new),
    })
}

fn moment(record: &FlightRecord, ns: u64) -> Moment {
    u128::from(record.began_unix_us) * 1000 + u128::from(ns)
}

/// The time from `earlier` until `later`.
fn since(earlier: Moment, later: Moment) -> Duration {
    let ns = later.saturating_sub(earlier);
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}

fn key_of(entry: &FlightEntry) -> Key {
    (entry.group, entry.epoch, entry.sequence)
}

fn by_operation<'a>(timelines: &BTreeMap<Rank, Timeline<'a>>) -> BTreeMap<Key, Operation<'a>> {
    let groups = timelines.values().flat_map(|timeline| &timeline.record.groups);
    let members: BTreeMap<GroupId, &[Rank]> = groups.map(|it| (it.id, &*it.ranks)).collect();
    let mut operations = BTreeMap::new();
    for (rank, Timeline { record, .. }) in timelines {
        for entry in record.entries.iter().filter(|entry| meets_others(entry, &members)) {
            let (key, began) = (key_of(entry), moment(record, entry.issued_ns));
            let (members, issued) = (Vec::new(), BTreeMap::new());
            let new = Operation { key, members, issued, began };
            let operation = operations.entry(key).or_insert(new);
            operation.began = operation.began.min(began);
            operation.issued.entry(*rank).or_insert((entry, began));
        }
    }
    for operation in operations.values_mut() {
        let known = members.get(&operation.key.0).map(|ranks| ranks.to_vec());
        operation.members = known.unwrap_or_else(|| operation.issued.keys().copied().collect());
    }
    operations
}

/// A transfer of a rank to itself has two entries of one rank: nobody differs there. A call that was refused because its
/// epoch was over, before it got a number, meets nobody.
fn meets_others(entry: &FlightEntry, members: &BTreeMap<GroupId, &[Rank]>) -> bool {
    let to_itself = members.get(&entry.group).is_some_and(|it| it.len() == 2 && it[0] == it[1]);
    !to_itself && entry.sequence != u64::MAX
}
