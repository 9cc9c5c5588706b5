//! Entries of all ranks, by operation.

use std::collections::BTreeMap;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{LastIssued, MemberFinding, Presence, WorldEnd, is_complete};
use crate::GroupId;
use crate::flight::{FlightEntry, FlightRecord};

/// Nanoseconds since 1970: what can be compared across processes.
pub(super) type Moment = u128;

/// What the records say, by operation.
pub(super) struct Operations<'a> {
    size: usize,
    timelines: BTreeMap<Rank, Timeline<'a>>,
    operations: BTreeMap<(GroupId, u64, u64), Operation<'a>>,
    left_out: Vec<Rank>,
}

/// One operation, as those see it that issued it.
pub(super) struct Operation<'a> {
    key: (GroupId, u64, u64),
    /// The members, in order; those that issued it, if no record lists the group.
    pub(super) members: Vec<Rank>,
    /// Who issued it, in the order of ranks.
    pub(super) issued: Vec<(Rank, &'a FlightEntry)>,
    /// When the first of them did.
    pub(super) began: Moment,
    /// When each of them did.
    moments: Vec<Moment>,
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
        self.members.iter().all(|rank| self.entry(*rank).is_some())
    }

    /// When it was issued, and by whom.
    pub(super) fn moments(&self) -> impl Iterator<Item = (Moment, Rank)> {
        self.moments.iter().zip(&self.issued).map(|(moment, (rank, _))| (*moment, *rank))
    }

    pub(super) fn entry(&self, rank: Rank) -> Option<&FlightEntry> {
        let at = self.issued.binary_search_by_key(&rank, |(issuer, _)| *issuer).ok()?;
        Some(self.issued[at].1)
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

    fn moment(&self, ns: u64) -> Moment {
        u128::from(self.record.began_unix_us) * 1000 + u128::from(ns)
    }

    /// Whether the ring may have had an entry of `operation`, which it has not now. PROTOCOL.md, "Flight recorder".
    fn may_have_overwritten(&self, operation: &Operation<'_>) -> bool {
        if self.record.overwritten == 0 {
            return false;
        }
        let (group, epoch, sequence) = operation.key;
        match (self.lowest.get(&(group, epoch)), self.record.entries.first()) {
            (Some(lowest), _) => sequence < *lowest,
            (None, Some(oldest)) => operation.began < self.moment(oldest.issued_ns),
            (None, None) => true,
        }
    }
}

impl<'a> Operations<'a> {
    pub(super) fn of(records: &'a [FlightRecord]) -> Self {
        let taken = |record: &&FlightRecord| {
            u128::from(record.began_unix_us) * 1000 + u128::from(record.taken_ns)
        };
        let mut newest_first: Vec<&FlightRecord> = records.iter().collect();
        newest_first.sort_by_key(|record| (std::cmp::Reverse(taken(record)), record.rank));
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
        Self { size, timelines, operations, left_out }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Operation<'a>> {
        self.operations.values()
    }

    pub(super) fn left_out(&self) -> &[Rank] {
        &self.left_out
    }

    pub(super) fn without_record(&self) -> Vec<Rank> {
        let ranks = (0..self.size).map(Rank::new);
        ranks.filter(|rank| !self.timelines.contains_key(rank)).collect()
    }

    pub(super) fn overwritten(&self) -> Vec<(Rank, u64)> {
        let counts = self.timelines.iter().map(|(rank, it)| (*rank, it.record.overwritten));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    pub(super) fn ends(&self) -> Vec<WorldEnd> {
        let mut ends: Vec<WorldEnd> = Vec::new();
        for (rank, timeline) in &self.timelines {
            let Some(text) = &timeline.record.end else { continue };
            match ends.iter_mut().find(|end| end.text == *text) {
                Some(end) => end.ranks.push(*rank),
                None => ends.push(WorldEnd { text: text.clone(), ranks: vec![*rank] }),
            }
        }
        ends
    }

    /// Whether it is not known of some member what it did: its record is lost, or its ring too short.
    pub(super) fn have_lost(&self, operation: &Operation<'_>) -> bool {
        let lost = |rank: &Rank| match self.timelines.get(rank) {
            Some(timeline) => timeline.may_have_overwritten(operation),
            None => true,
        };
        operation.members.iter().any(|rank| operation.entry(*rank).is_none() && lost(rank))
    }

    pub(super) fn world_has_ended(&self) -> bool {
        self.timelines.values().any(|timeline| timeline.record.end.is_some())
    }

    /// Whether some rank has left this operation's epoch behind: it belongs to an aborted step.
    pub(super) fn is_of_the_past(&self, operation: &Operation<'_>) -> bool {
        let (_, epoch, _) = operation.key;
        self.timelines.values().any(|timeline| timeline.record.epoch > epoch)
    }

    pub(super) fn moment(&self, rank: Rank, ns: u64) -> Moment {
        self.timelines.get(&rank).map_or(0, |timeline| timeline.moment(ns))
    }

    /// When those who issued an operation gave up, or else when they were last heard of.
    pub(super) fn moment_of(&self, operation: &Operation<'_>) -> Moment {
        let last = |(rank, entry): &(Rank, &FlightEntry)| {
            let timeline = self.timelines.get(rank)?;
            Some(timeline.moment(entry.settled_ns.unwrap_or(timeline.record.taken_ns)))
        };
        operation.issued.iter().filter_map(last).max().unwrap_or(0)
    }

    /// What `rank` waits for, or waited for in vain when the world ended; not `operation`, and nothing of the past.
    pub(super) fn other_wait(&self, rank: Rank, operation: &Operation<'_>) -> Option<&FlightEntry> {
        let record = self.timelines.get(&rank)?.record;
        let other = |entry: &&FlightEntry| key_of(entry) != operation.key;
        let now = |entry: &&FlightEntry| entry.epoch == record.epoch;
        let waits = record.entries.iter().filter(other).filter(now);
        waits.into_iter().find(|entry| entry.is_waited_for())
    }

    /// What a member of an operation did, as seen at `moment`.
    pub(super) fn member(
        &self,
        operation: &Operation<'_>,
        rank: Rank,
        moment: Moment,
    ) -> MemberFinding {
        let presence = match (operation.entry(rank), self.timelines.get(&rank)) {
            (Some(entry), _) => Presence::Issued(Box::new(*entry)),
            (None, None) => Presence::NoRecord,
            (None, Some(timeline)) if timeline.may_have_overwritten(operation) => {
                Presence::Overwritten
            }
            (None, Some(timeline)) => {
                Presence::NotIssued(timeline.record.entries.last().map(|last| LastIssued {
                    operation: Box::new(*last),
                    ago: since(timeline.moment(last.issued_ns), moment),
                    waits_in: self.other_wait(rank, operation).copied().map(Box::new),
                }))
            }
        };
        MemberFinding { rank, presence }
    }
}

/// How long after `earlier` it was at `later`.
pub(super) fn since(earlier: Moment, later: Moment) -> Duration {
    let ns = later.saturating_sub(earlier);
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}

fn key_of(entry: &FlightEntry) -> (GroupId, u64, u64) {
    (entry.group, entry.epoch, entry.sequence)
}

fn by_operation<'a>(
    timelines: &BTreeMap<Rank, Timeline<'a>>,
) -> BTreeMap<(GroupId, u64, u64), Operation<'a>> {
    let mut members: BTreeMap<GroupId, &[Rank]> = BTreeMap::new();
    for timeline in timelines.values() {
        members.extend(timeline.record.groups.iter().map(|group| (group.id, &*group.ranks)));
    }
    let mut operations = BTreeMap::new();
    for (rank, timeline) in timelines {
        for entry in timeline.record.entries.iter().filter(|entry| meets_others(entry, &members)) {
            let key = key_of(entry);
            let moment = timeline.moment(entry.issued_ns);
            let operation = operations.entry(key).or_insert_with(|| Operation {
                key,
                members: Vec::new(),
                issued: Vec::new(),
                began: moment,
                moments: Vec::new(),
            });
            operation.began = operation.began.min(moment);
            operation.issued.push((*rank, entry));
            operation.moments.push(moment);
        }
    }
    for operation in operations.values_mut() {
        let issuers = operation.issued.iter().map(|(rank, _)| *rank);
        let known = members.get(&operation.key.0).map(|ranks| ranks.to_vec());
        operation.members = known.unwrap_or_else(|| issuers.collect());
    }
    operations
}

/// What a rank sends to itself has two entries of one rank: nobody differs there. A call that was refused because its
/// epoch was over, before it got a number, meets nobody.
fn meets_others(entry: &FlightEntry, members: &BTreeMap<GroupId, &[Rank]>) -> bool {
    let to_itself = members.get(&entry.group).is_some_and(|it| it.len() == 2 && it[0] == it[1]);
    !to_itself && entry.sequence != u64::MAX
}

/// Whether nobody has to wait for an operation any more.
pub(super) fn is_over(operation: &Operation<'_>) -> bool {
    operation.issued.iter().all(|(_, entry)| is_complete(entry))
}
