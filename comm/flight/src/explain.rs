//! The comparison of the records of all ranks. Pure: it reads records, and knows no world.
//!
//! In reading order: the operations (the ranks that issued each), the ranks that wait for others,
//! the slow ranks; `words`.

mod words;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hsdp_sharding::Rank;

use crate::{FlightEntry, FlightRecord, FlightState, GroupId, ModelLabel};

/// The result of comparing the records of a world's ranks. Displayed in a few lines:
///
/// ```text
/// step 7, microbatch 0: ranks 0, 2, 3 wait in reduce_scatter of unit 3 (sequence 41), for 3.0 s; rank 1 has not issued it: \
/// its last operation was all_gather of unit 2 (sequence 40), 3.2 s ago
/// the world ended: world aborted: rank 1, step 7, last in all_gather ...: deadline of 3s missed in ...
/// slowest: step 7, microbatch 0: rank 1 issued all_gather of unit 2 (sequence 40) 12 ms after the others; \
/// it was most often the last to issue, in 30 of 40
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// Ranks in the world; 0 if there was no record.
    pub size: usize,
    /// Models whose operations the records have, in the order of their numbers.
    pub models: Vec<ModelLabel>,
    /// Operations of groups of more than one rank that were compared on all members.
    pub compared: usize,
    /// Operations for which a member's record, or its entry, is lost.
    pub partly_known: usize,
    /// The first operation at which ranks differ or are stuck.
    pub finding: Finding,
    /// The largest lateness at the issue of an operation.
    pub lateness: Option<Lateness>,
    /// The rank that was most often the last to issue.
    pub often_last: Option<OftenLast>,
    /// The end of the world according to the ranks: one entry if they agree.
    pub ends: Vec<WorldEnd>,
    /// Ranks without a record.
    pub without_record: Vec<Rank>,
    /// Ranks that have overwritten entries, each with the number of these entries.
    pub overwritten: Vec<(Rank, u64)>,
    /// Ranks with a record that was ignored: of a world of another size, of one that was over
    /// before that of the newest record began, or older than another record of the rank.
    pub left_out: Vec<Rank>,
}

/// The first operation at which ranks differ or are stuck.
#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// No fault, as far as the records show.
    Nothing,
    /// Members issued different calls.
    Mismatch {
        /// The call of the first member that issued one.
        operation: Box<FlightEntry>,
        /// All members, in order.
        members: Vec<MemberFinding>,
    },
    /// Members wait in vain for others, or had issued the operation but not begun to wait when the
    /// world ended.
    Missing {
        /// The operation that they wait for.
        operation: Box<FlightEntry>,
        /// The ranks that wait for it; if no rank waits, the ranks that have issued it.
        waiting: Vec<Rank>,
        /// The time for which the first of them has waited, or had waited when the operation
        /// failed; `None` if no rank waits.
        waited: Option<Duration>,
        /// The members that have not issued it, or of which that is unknown.
        absent: Vec<MemberFinding>,
    },
    /// All members have issued the operation, but its work failed or does not end.
    Unfinished {
        /// The entry of the first member.
        operation: Box<FlightEntry>,
        /// The members.
        ranks: Vec<Rank>,
    },
}

/// The part of one member in an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberFinding {
    /// The member.
    pub rank: Rank,
    /// Whether it issued the operation.
    pub presence: Presence,
}

/// Whether a rank issued an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Presence {
    /// The rank issued it.
    Issued(Box<FlightEntry>),
    /// The rank did not issue it. Holds the last operation that it issued, if there is one.
    NotIssued(Option<LastIssued>),
    /// Unknown: the rank's ring may have overwritten the entry.
    Overwritten,
    /// Unknown: the rank has no record.
    NoRecord,
}

/// The last operation that a rank issued, on any channel.
#[derive(Clone, Debug, PartialEq)]
pub struct LastIssued {
    /// The operation.
    pub operation: Box<FlightEntry>,
    /// The time from its issue until the waiting ranks failed, or until their records were taken.
    pub ago: Duration,
    /// The first other operation for which the rank itself waits, if it does.
    pub waits_in: Option<Box<FlightEntry>>,
}

/// The delay with which a rank issued an operation after the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Lateness {
    /// The rank.
    pub rank: Rank,
    /// The delay after the median of the other members.
    pub late: Duration,
    /// The operation.
    pub operation: Box<FlightEntry>,
}

/// The rank that was most often the last to issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OftenLast {
    /// The rank.
    pub rank: Rank,
    /// The number of operations in which it was the last.
    pub times: usize,
    /// The number of operations that were compared.
    pub of: usize,
}

/// The end of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldEnd {
    /// The error, in words.
    pub text: String,
    /// The ranks whose records have this error.
    pub ranks: Vec<Rank>,
}

/// Compares the records of a world's ranks, in any order: finds the first operation in which they
/// differ, the missing ranks, and the slow ranks.
///
/// Entries of different ranks belong to the same operation if group, epoch and sequence number are
/// equal. Records may be lost and entries overwritten: the explanation says which parts are
/// unknown. Records of other worlds than that of the newest record are ignored, if they show it:
/// their world has another size, or they were taken before that of the newest record began, as the
/// records of an earlier attempt that wrote into the same folder.
///
/// [`FlightRecord::from_json`] reads the text of a file that a rank has left in the folder
/// `hsdp_comm::WorldOptions::flight_dir`.
#[must_use]
pub fn explain(records: &[FlightRecord]) -> Explanation {
    let operations = Operations::of(records);
    let of_several = || operations.iter().filter(|operation| operation.members.len() > 1);
    let whole: Vec<_> = of_several().filter(|operation| operation.is_known()).collect();
    let partly = of_several().filter(|operation| operations.have_lost(operation));
    let finding = mismatch(&operations).or_else(|| first_stall(&operations));
    let (lateness, often_last) = lateness_of(&whole);
    let ends = operations.records().filter_map(|it| Some((it.end.clone()?, it.rank)));
    let entries = operations.records().flat_map(|record| &record.entries);
    let models: BTreeSet<ModelLabel> = entries.filter_map(|entry| entry.tag.model).collect();
    let overwritten = operations.records().map(|record| (record.rank, record.overwritten));
    Explanation {
        size: operations.size,
        models: models.into_iter().collect(),
        compared: whole.len(),
        partly_known: partly.count(),
        finding: finding.unwrap_or(Finding::Nothing),
        lateness,
        often_last,
        ends: together(ends).map(|(text, ranks)| WorldEnd { text, ranks }).collect(),
        without_record: operations.without_record(),
        overwritten: overwritten.filter(|(_, count)| *count > 0).collect(),
        left_out: operations.left_out,
    }
}

/// The first operation of which two members want different things.
fn mismatch(operations: &Operations<'_>) -> Option<Finding> {
    let disagree = operations.iter().filter(|operation| {
        let first = operation.first();
        operation.entries().any(|entry| !first.agrees_with(entry))
    });
    let operation = disagree.min_by_key(|operation| operation.began)?;
    let first = Box::new(*operation.first());
    let members = operations.members(operation);
    Some(Finding::Mismatch { operation: first, members: members.collect() })
}

/// The ranks of each text, in the order of the first ranks.
fn together(
    texts: impl Iterator<Item = (String, Rank)>,
) -> impl Iterator<Item = (String, Vec<Rank>)> {
    let mut together: Vec<(String, Vec<Rank>)> = Vec::new();
    for (text, rank) in texts {
        match together.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => ranks.push(rank),
            None => together.push((text, vec![rank])),
        }
    }
    together.into_iter()
}

/// Nanoseconds since 1970, which can be compared across processes.
type UnixTime = u128;

/// Group, epoch and sequence number, which the entries of an operation have in common.
type SeenKey = (GroupId, u64, u64);

/// The lowest number that a ring still has, by rank, group and epoch.
type Lowest = BTreeMap<(Rank, GroupId, u64), u64>;

/// The records of all ranks, and their entries by operation.
struct Operations<'a> {
    size: usize,
    left_out: Vec<Rank>,
    records: BTreeMap<Rank, &'a FlightRecord>,
    lowest: Lowest,
    operations: BTreeMap<SeenKey, OperationSeen<'a>>,
}

/// One operation, as the ranks see it that issued it.
struct OperationSeen<'a> {
    key: SeenKey,
    /// The members, in order; the issuers, if no record lists the group.
    members: Vec<Rank>,
    /// The issuers, each with its record and its entry there.
    issued: BTreeMap<Rank, (&'a FlightRecord, &'a FlightEntry)>,
    /// The time of the first issue.
    began: UnixTime,
}

impl OperationSeen<'_> {
    /// Whether there is an entry of each member.
    fn is_known(&self) -> bool {
        self.members.iter().all(|rank| self.issued.contains_key(rank))
    }

    /// The issuers, in order.
    fn issuers(&self) -> impl Iterator<Item = (Rank, &FlightEntry)> {
        self.issued.iter().map(|(rank, (_, entry))| (*rank, *entry))
    }

    fn entries(&self) -> impl Iterator<Item = &FlightEntry> {
        self.issuers().map(|(_, entry)| entry)
    }

    /// The entry of the first issuer.
    fn first(&self) -> &FlightEntry {
        self.entries().next().expect("an operation has an issuer")
    }

    /// The last issuer, its entry, and the time from the median issue of the others until its own;
    /// `None` if there are no others.
    fn last(&self) -> Option<(Rank, &FlightEntry, Duration)> {
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
    fn is_over(&self) -> bool {
        self.entries().all(|entry| entry.state == FlightState::Complete)
    }

    fn is_waited_for(&self) -> bool {
        self.entries().any(FlightEntry::is_waited_for)
    }

    /// The time from the first wait for the operation until its issuers gave up; `None` if no rank
    /// waits.
    fn waited(&self) -> Option<Duration> {
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
    fn of(records: &'a [FlightRecord]) -> Self {
        let mut newest_first: Vec<&FlightRecord> = records.iter().collect();
        newest_first.sort_by_key(|it| (Reverse(it.unix_ns(it.taken_ns)), it.rank));
        let newest = newest_first.first().copied();
        let size = newest.map_or(0, |record| record.size);
        let is_older = |it: &FlightRecord| newest.and_then(|newest| it.time_until_world_of(newest));
        let mut records = BTreeMap::new();
        let mut left_out = Vec::new();
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

    fn iter(&self) -> impl Iterator<Item = &OperationSeen<'a>> {
        self.operations.values()
    }

    fn records(&self) -> impl Iterator<Item = &'a FlightRecord> {
        self.records.values().copied()
    }

    fn without_record(&self) -> Vec<Rank> {
        let ranks = (0..self.size).map(Rank::new);
        ranks.filter(|rank| !self.records.contains_key(rank)).collect()
    }

    /// Whether some rank has left this operation's epoch behind: it belongs to an aborted step.
    fn is_of_the_past(&self, operation: &OperationSeen<'_>) -> bool {
        let (_, epoch, _) = operation.key;
        self.records().any(|record| record.epoch > epoch)
    }

    /// Whether the part of some member is unknown: its record is lost, or its ring too short.
    fn have_lost(&self, operation: &OperationSeen<'_>) -> bool {
        let absent = operation.members.iter().filter(|rank| !operation.issued.contains_key(rank));
        absent.into_iter().any(|rank| self.lost(operation, *rank).is_some())
    }

    /// The reason why the part of a member without an entry is unknown, if it is. FLIGHT.md.
    fn lost(&self, operation: &OperationSeen<'_>, rank: Rank) -> Option<Presence> {
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
    fn members(&self, operation: &OperationSeen<'_>) -> impl Iterator<Item = MemberFinding> {
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

    /// The last operation of a rank that has not issued `operation`, seen at `end`; and the
    /// operation for which the rank waits, or waited when the world ended: not `operation`, and
    /// none of an earlier epoch.
    fn last_issued(
        &self,
        rank: Rank,
        operation: &OperationSeen<'_>,
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

fn key_of(entry: &FlightEntry) -> SeenKey {
    (entry.group, entry.epoch, entry.sequence)
}

fn by_operation<'a>(
    records: &BTreeMap<Rank, &'a FlightRecord>,
) -> (Lowest, BTreeMap<SeenKey, OperationSeen<'a>>) {
    let groups = records.values().flat_map(|record| &record.groups);
    let members: BTreeMap<GroupId, &[Rank]> = groups.map(|it| (it.id, &*it.ranks)).collect();
    let mut lowest = Lowest::new();
    let mut operations = BTreeMap::new();
    for (rank, record) in records {
        for entry in &record.entries {
            let first = lowest.entry((*rank, entry.group, entry.epoch)).or_insert(entry.sequence);
            *first = entry.sequence.min(*first);
            if !meets_others(entry, &members) {
                continue;
            }
            let key = key_of(entry);
            let began = record.unix_ns(entry.issued_ns);
            let members = Vec::new();
            let issued = BTreeMap::new();
            let new = OperationSeen { key, members, issued, began };
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

/// A transfer of a rank to itself has two entries of one rank, which never differ. A call that was
/// refused because its epoch was over, before it got a number, meets no other.
fn meets_others(entry: &FlightEntry, members: &BTreeMap<GroupId, &[Rank]>) -> bool {
    let to_itself = members.get(&entry.group).is_some_and(|it| it.len() == 2 && it[0] == it[1]);
    !to_itself && entry.sequence != u64::MAX
}

/// The first operation in which ranks wait in vain, for a reason that lies there.
///
/// Ranks that wait for a rank that waits elsewhere do so because of the operation there: operations
/// that they wait for come later, and are found only if ranks wait for each other. Operations
/// without a waiting rank come last: they say something only if the world ended before any rank
/// began to wait.
fn first_stall(operations: &Operations<'_>) -> Option<Finding> {
    let stalled = operations.iter().filter(|operation| is_stalled(operations, operation));
    let candidates = stalled.map(|operation| (operation, absent(operations, operation)));
    let order = |(operation, absent): &(&OperationSeen<'_>, Vec<MemberFinding>)| {
        let elsewhere = !absent.is_empty() && absent.iter().all(waits_elsewhere);
        (!operation.is_waited_for(), elsewhere, operation.began)
    };
    let (operation, absent) = candidates.min_by_key(order)?;
    let first = Box::new(*operation.first());
    if absent.is_empty() {
        return Some(Finding::Unfinished { operation: first, ranks: operation.members.clone() });
    }
    let waited = operation.waited();
    let waits = operation.issuers().filter(|(_, it)| waited.is_none() || it.is_waited_for());
    let waiting = waits.map(|(rank, _)| rank).collect();
    Some(Finding::Missing { operation: first, waiting, waited, absent })
}

/// Whether it does not complete, though a rank waits for it, or the world has ended.
fn is_stalled(operations: &Operations<'_>, operation: &OperationSeen<'_>) -> bool {
    !operation.is_over()
        && !operations.is_of_the_past(operation)
        && (operation.is_waited_for() || operations.records().any(|record| record.end.is_some()))
}

/// The members that have not issued it, as far as is known.
fn absent(operations: &Operations<'_>, operation: &OperationSeen<'_>) -> Vec<MemberFinding> {
    let members = operations.members(operation);
    members.filter(|member| !matches!(member.presence, Presence::Issued(_))).collect()
}

fn waits_elsewhere(member: &MemberFinding) -> bool {
    match &member.presence {
        Presence::NotIssued(Some(last)) => last.waits_in.is_some(),
        Presence::Overwritten => true,
        _ => false,
    }
}

/// The largest lateness, and the rank that was the last most often, of operations that all members
/// have issued.
fn lateness_of(operations: &[&OperationSeen<'_>]) -> (Option<Lateness>, Option<OftenLast>) {
    let mut times: BTreeMap<Rank, usize> = BTreeMap::new();
    let mut worst: Option<Lateness> = None;
    let mut count = 0;
    for (rank, entry, late) in operations.iter().filter_map(|operation| operation.last()) {
        *times.entry(rank).or_default() += 1;
        count += 1;
        if worst.as_ref().is_none_or(|worst| late > worst.late) {
            worst = Some(Lateness { rank, late, operation: Box::new(*entry) });
        }
    }
    let often = times.into_iter().max_by_key(|(rank, times)| (*times, Reverse(*rank)));
    (worst, often.map(|(rank, times)| OftenLast { rank, times, of: count }))
}
