//! Who waits in vain, and for whom.

use hsdp_sharding::Rank;

use super::operations::{Operation, Operations, is_over, since};
use super::{Finding, MemberFinding, Presence};

/// The first operation in which ranks wait in vain, for a reason that lies there.
///
/// Ranks that wait for a rank that waits elsewhere do so because of what happens there: such operations come later, and
/// are found only if ranks wait for each other. Those that nobody waits for come last: they say something only if the
/// world ended before anybody got to wait.
pub(super) fn first(operations: &Operations<'_>) -> Option<Finding> {
    let stalled = operations.iter().filter(|operation| is_stalled(operations, operation));
    let candidates = stalled.map(|operation| (operation, absent(operations, operation)));
    let rank = |(operation, absent): &(&Operation<'_>, Vec<MemberFinding>)| {
        let elsewhere = !absent.is_empty() && absent.iter().all(waits_elsewhere);
        (!is_waited_for(operation), elsewhere, operation.began)
    };
    let (operation, absent) = candidates.min_by_key(rank)?;
    Some(finding(operations, operation, absent))
}

/// Whether it does not complete, though somebody waits for it, or the world has ended.
fn is_stalled(operations: &Operations<'_>, operation: &Operation<'_>) -> bool {
    !is_over(operation)
        && !operations.is_of_the_past(operation)
        && (is_waited_for(operation) || operations.world_has_ended())
}

fn is_waited_for(operation: &Operation<'_>) -> bool {
    operation.issued.iter().any(|(_, entry)| entry.is_waited_for())
}

/// The members that have not issued it, as far as is known.
fn absent(operations: &Operations<'_>, operation: &Operation<'_>) -> Vec<MemberFinding> {
    let moment = operations.moment_of(operation);
    let members = operation.members.iter();
    let members = members.map(|rank| operations.member(operation, *rank, moment));
    members.filter(|member| !matches!(member.presence, Presence::Issued(_))).collect()
}

fn waits_elsewhere(member: &MemberFinding) -> bool {
    match &member.presence {
        Presence::NotIssued(Some(last)) => last.waits_in.is_some(),
        Presence::Overwritten => true,
        _ => false,
    }
}

fn finding(
    operations: &Operations<'_>,
    operation: &Operation<'_>,
    absent: Vec<MemberFinding>,
) -> Finding {
    let waits = operation.issued.iter().filter(|(_, entry)| entry.is_waited_for());
    let waiting: Vec<Rank> = waits.clone().map(|(rank, _)| *rank).collect();
    let as_first_seen = Box::new(*operation.issued[0].1);
    if absent.is_empty() {
        return Finding::Unfinished { operation: as_first_seen, ranks: operation.members.clone() };
    }
    let began = waits.filter_map(|(rank, entry)| Some(operations.moment(*rank, entry.waited_ns?)));
    let waited = began.min().map(|began| since(began, operations.moment_of(operation)));
    let issued = operation.issued.iter().map(|(rank, _)| *rank);
    let waiting = if waiting.is_empty() { issued.collect() } else { waiting };
    Finding::Missing { operation: as_first_seen, waiting, waited, absent }
}
