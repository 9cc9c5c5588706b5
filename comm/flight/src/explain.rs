//! The comparison of the records of all ranks. Pure: it reads records, and knows no world.
//!
//! In reading order: `operations` (the ranks that issued each), `stalls` (the ranks that wait for others), `lateness` (the slow ranks), `words`.

mod lateness;
mod operations;
mod stalls;
mod words;

use std::collections::BTreeSet;
use std::time::Duration;

use hsdp_sharding::Rank;

use self::operations::Operations;
use crate::{FlightEntry, FlightRecord, ModelLabel};

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
    /// Ranks with a record that was ignored: of a world of another size, of one that was over before that of the newest record began, or
    /// older than another record of the rank.
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
    /// Members wait in vain for others, or had issued the operation but not begun to wait when the world ended.
    Missing {
        /// The operation that they wait for.
        operation: Box<FlightEntry>,
        /// The ranks that wait for it; if no rank waits, the ranks that have issued it.
        waiting: Vec<Rank>,
        /// The time for which the first of them has waited, or had waited when the operation failed; `None` if no rank waits.
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

/// Compares the records of a world's ranks, in any order: finds the first operation in which they differ, the missing ranks,
/// and the slow ranks.
///
/// Entries of different ranks belong to the same operation if group, epoch and sequence number are equal. Records may be lost
/// and entries overwritten: the explanation says which parts are unknown. Records of other worlds than that of the newest record are
/// ignored, if they show it: their world has another size, or they were taken before that of the newest record began, as the
/// records of an earlier attempt that wrote into the same folder.
///
/// [`FlightRecord::read_from`] reads the records of a world that was launched with `hsdp_comm::WorldOptions::flight_dir`.
#[must_use]
pub fn explain(records: &[FlightRecord]) -> Explanation {
    let operations = Operations::of(records);
    let of_several = || operations.iter().filter(|operation| operation.members.len() > 1);
    let whole: Vec<_> = of_several().filter(|operation| operation.is_known()).collect();
    let partly = of_several().filter(|operation| operations.have_lost(operation));
    let finding = mismatch(&operations).or_else(|| stalls::first(&operations));
    let (lateness, often_last) = lateness::of(&whole);
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
    let (first, members) = (Box::new(*operation.first()), operations.members(operation));
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
