//! What the records of all ranks say together. Pure: it reads records, and knows no world.
//!
//! In reading order: `operations` (who issued what), `stalls` (who waits for whom), `lateness` (who was slow), `words`.

mod lateness;
mod operations;
mod stalls;
mod words;

use std::time::Duration;

use hsdp_sharding::Rank;

use self::operations::Operations;
use super::{FlightEntry, FlightRecord, FlightState};

/// What the records of a world's ranks say together. Displayed in a few lines:
///
/// ```text
/// step 7, microbatch 0: ranks 0, 2, 3 wait in reduce_scatter of unit 3 (sequence 41); rank 1 has not issued it: its last \
/// operation was all_gather of unit 2 (sequence 40), 3.2 s ago
/// the world ended: world aborted: rank 1, step 7, last in all_gather ...: deadline of 3s missed in ...
/// slowest: rank 1 issued all_gather of unit 2 (sequence 40) 12 ms after the others, in step 7, microbatch 0; it was the \
/// last in 30 of 40 operations
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// Ranks in the world; 0 if there was no record.
    pub size: usize,
    /// Operations, of groups of more than one rank, that were compared on all members.
    pub compared: usize,
    /// Operations of which a member's record, or its entry, is lost.
    pub partly_known: usize,
    /// The first operation at which ranks differ or are stuck.
    pub finding: Finding,
    /// The largest lateness at the issue of an operation.
    pub lateness: Option<Lateness>,
    /// Who was the last to issue most often.
    pub often_last: Option<OftenLast>,
    /// How the world ended, as the ranks say: one, if they agree.
    pub ends: Vec<WorldEnd>,
    /// Ranks of which there is no record.
    pub without_record: Vec<Rank>,
    /// How many entries ranks have overwritten, of those that have.
    pub overwritten: Vec<(Rank, u64)>,
    /// Ranks whose record is of a world of another size, or is an older one of the same rank, and was not looked at.
    pub left_out: Vec<Rank>,
}

/// The first operation at which ranks differ or are stuck.
#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// Nothing is wrong, as far as the records show.
    Nothing,
    /// Members want different things.
    Mismatch {
        /// What the first of them wants.
        operation: Box<FlightEntry>,
        /// All members, in order.
        members: Vec<MemberFinding>,
    },
    /// Members wait in vain for others, or did not get to wait before the world ended.
    Missing {
        /// What they wait for.
        operation: Box<FlightEntry>,
        /// Who waits for it; if nobody does, who has issued it.
        waiting: Vec<Rank>,
        /// For how long the first of them has waited, until it failed; `None` if nobody waits.
        waited: Option<Duration>,
        /// Who has not come, as far as is known.
        absent: Vec<MemberFinding>,
    },
    /// All members have issued it, but its work failed or does not end.
    Unfinished {
        /// The operation, as the first of them sees it.
        operation: Box<FlightEntry>,
        /// Its members.
        ranks: Vec<Rank>,
    },
}

/// What a member of an operation did.
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
    /// It did.
    Issued(Box<FlightEntry>),
    /// It did not.
    NotIssued(Option<LastIssued>),
    /// Its ring is too short to tell.
    Overwritten,
    /// There is no record of it.
    NoRecord,
}

/// What a rank issued last, on any channel.
#[derive(Clone, Debug, PartialEq)]
pub struct LastIssued {
    /// The operation.
    pub operation: Box<FlightEntry>,
    /// How long before those who wait gave up, or were recorded.
    pub ago: Duration,
    /// Whether it waits for another operation itself: the first of those.
    pub waits_in: Option<Box<FlightEntry>>,
}

/// How much later than the others a rank issued an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Lateness {
    /// The rank.
    pub rank: Rank,
    /// After the median of the other members.
    pub late: Duration,
    /// The operation.
    pub operation: Box<FlightEntry>,
}

/// The rank that was the last to issue most often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OftenLast {
    /// The rank.
    pub rank: Rank,
    /// In so many operations
    pub times: usize,
    /// of so many.
    pub of: usize,
}

/// How a world ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldEnd {
    /// In words.
    pub text: String,
    /// The ranks that say so.
    pub ranks: Vec<Rank>,
}

/// Compares the records of a world's ranks, in any order: where they first differ, who is missing, who was slow.
///
/// Operations of different ranks are the same if group, epoch and number are. Some records may be lost, and some
/// entries overwritten: what then cannot be known is said. Records of different worlds should not be mixed; those of
/// another size than the latest are left out.
///
/// ```
/// use hsdp_comm::{Channel, Finding, Tag, explain, world};
///
/// let records = world(2, |world| {
///     let group = world.world_group(Channel::User);
///     let pending = group.barrier(Tag::default());
///     pending.and_then(|pending| pending.wait()).expect("both");
///     world.flight_record()
/// });
/// let explanation = explain(&records);
/// assert_eq!(explanation.finding, Finding::Nothing);
/// let text = explanation.to_string();
/// assert!(text.starts_with("all ranks agree; 1 operation of 2 ranks compared, and nobody waits in vain"));
/// ```
///
/// Of a world that was launched with [`WorldOptions::flight_dir`](crate::WorldOptions::flight_dir), records are read with
/// [`FlightRecord::read_from`].
#[must_use]
pub fn explain(records: &[FlightRecord]) -> Explanation {
    let operations = Operations::of(records);
    let of_several = || operations.iter().filter(|operation| operation.members.len() > 1);
    let whole: Vec<_> = of_several().filter(|operation| operation.is_known()).collect();
    let partly = of_several().filter(|operation| operations.have_lost(operation));
    let finding = mismatch(&operations).or_else(|| stalls::first(&operations));
    let (lateness, often_last) = lateness::of(&whole);
    Explanation {
        size: operations.size(),
        compared: whole.len(),
        partly_known: partly.count(),
        finding: finding.unwrap_or(Finding::Nothing),
        lateness,
        often_last,
        ends: operations.ends(),
        without_record: operations.without_record(),
        overwritten: operations.overwritten(),
        left_out: operations.left_out().to_vec(),
    }
}

/// The first operation of which two members want different things.
fn mismatch(operations: &Operations<'_>) -> Option<Finding> {
    let disagree = operations.iter().filter(|operation| {
        let mut entries = operation.issued.iter().map(|(_, entry)| entry);
        let first = entries.next();
        first.is_some_and(|first| entries.any(|entry| !first.agrees_with(entry)))
    });
    let operation = disagree.min_by_key(|operation| operation.began)?;
    let moment = operations.moment_of(operation);
    let member = |rank: &Rank| operations.member(operation, *rank, moment);
    Some(Finding::Mismatch {
        operation: Box::new(*operation.issued.first()?.1),
        members: operation.members.iter().map(member).collect(),
    })
}

fn is_complete(entry: &FlightEntry) -> bool {
    entry.state == FlightState::Complete
}
