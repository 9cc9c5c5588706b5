//! The ranks that wait in vain, and the ranks that they wait for.

use super::operations::{Operation, Operations};
use super::{Finding, MemberFinding, Presence};

/// The first operation in which ranks wait in vain, for a reason that lies there.
///
/// Ranks that wait for a rank that waits elsewhere do so because of the operation there: operations that they wait for come later, and
/// are found only if ranks wait for each other. Operations without a waiting rank come last: they say something only if the
/// world ended before any rank began to wait.
pub(super) fn first(operations: &Operations<'_>) -> Option<Finding> {
    let stalled = operations.iter().filter(|operation| is_stalled(operations, operation));
    let candidates = stalled.map(|operation| (operation, absent(operations, operation)));
    let order = |(operation, absent): &(&Operation<'_>, Vec<MemberFinding>)| {
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
fn is_stalled(operations: &Operations<'_>, operation: &Operation<'_>) -> bool {
    !operation.is_over()
        && !operations.is_of_the_past(operation)
        && (operation.is_waited_for() || operations.records().any(|record| record.end.is_some()))
}

/// The members that have not issued it, as far as is known.
fn absent(operations: &Operations<'_>, operation: &Operation<'_>) -> Vec<MemberFinding> {
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
