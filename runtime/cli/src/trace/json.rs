//! Formats an explanation as JSON: its text, and its parts.

use std::time::Duration;

use hsdp_comm::{Explanation, Finding, MemberFinding, Presence};
use hsdp_sharding::Rank;
use serde_json::{Value, json};

/// Returns the whole explanation. Times are in seconds.
pub(super) fn of(explanation: &Explanation) -> Value {
    let ends =
        explanation.ends.iter().map(|end| json!({ "text": end.text, "ranks": ranks(&end.ranks) }));
    let late = explanation.lateness.as_ref().map(|it| {
        json!({ "rank": it.rank.get(), "seconds": seconds(it.late), "operation": *it.operation })
    });
    let last = explanation.often_last;
    let overwritten = explanation.overwritten.iter();
    json!({
        "text": explanation.to_string(),
        "size": explanation.size,
        "compared": explanation.compared,
        "partly_known": explanation.partly_known,
        "finding": finding(&explanation.finding),
        "slowest": late,
        "often_last": last.map(|it| json!({ "rank": it.rank.get(), "times": it.times, "of": it.of })),
        "ends": ends.collect::<Vec<_>>(),
        "without_record": ranks(&explanation.without_record),
        "left_out": ranks(&explanation.left_out),
        "overwritten": overwritten
            .map(|(rank, entries)| json!({ "rank": rank.get(), "entries": entries }))
            .collect::<Vec<_>>(),
    })
}

fn finding(finding: &Finding) -> Value {
    match finding {
        Finding::Nothing => json!({ "kind": "nothing" }),
        Finding::Mismatch { operation, members } => {
            json!({ "kind": "mismatch", "operation": **operation, "members": all(members) })
        }
        Finding::Missing { operation, waiting, waited, absent } => json!({
            "kind": "missing", "operation": **operation, "waiting": ranks(waiting),
            "waited": waited.map(seconds), "absent": all(absent),
        }),
        Finding::Unfinished { operation, ranks: members } => {
            json!({ "kind": "unfinished", "operation": **operation, "ranks": ranks(members) })
        }
    }
}

fn all(members: &[MemberFinding]) -> Vec<Value> {
    members.iter().map(member).collect()
}

fn member(member: &MemberFinding) -> Value {
    let rank = member.rank.get();
    match &member.presence {
        Presence::Issued(entry) => json!({ "rank": rank, "presence": "issued", "entry": **entry }),
        Presence::NotIssued(last) => {
            let last = last.as_ref().map(|last| {
                let waits_in = last.waits_in.as_deref();
                json!({ "operation": *last.operation, "ago": seconds(last.ago), "waits_in": waits_in })
            });
            json!({ "rank": rank, "presence": "not issued", "last": last })
        }
        Presence::Overwritten => json!({ "rank": rank, "presence": "overwritten" }),
        Presence::NoRecord => json!({ "rank": rank, "presence": "no record" }),
    }
}

fn ranks(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.get()).collect()
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}
