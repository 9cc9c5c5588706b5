//! An explanation in words, one line for each part.

use std::fmt;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{Explanation, Finding, LastIssued, Lateness, MemberFinding, OftenLast, Presence};
use crate::{FlightEntry, FlightState, Stage};

/// More ranks than these are counted, not listed.
const LISTED: usize = 16;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.size == 0 {
            return f.write_str("there is no record");
        }
        f.write_str(&self.found())?;
        let mut lines = self.ends().chain(self.slowest()).chain(self.unknown());
        lines.try_for_each(|line| write!(f, "\n{line}"))
    }
}

impl Explanation {
    fn found(&self) -> String {
        match &self.finding {
            Finding::Nothing => {
                let (compared, size) =
                    (counted(self.compared, "operation"), counted(self.size, "rank"));
                format!("all ranks agree; {compared} of {size} compared, and no rank waits in vain")
            }
            Finding::Mismatch { operation, members } => mismatch(operation, members),
            Finding::Missing { operation, waiting, waited, absent } => {
                let (one, name) = (waiting.len() == 1, named(operation));
                let part = match waited {
                    Some(waited) => {
                        let wait = if one { "waits" } else { "wait" };
                        format!("{wait} in {name}, for {}", time(*waited))
                    }
                    None => format!("{} issued {name}", if one { "has" } else { "have" }),
                };
                let absent: String = absent.iter().map(missed).collect();
                format!("{}{} {part}{absent}", place(operation), listed(waiting))
            }
            Finding::Unfinished { operation, ranks } => {
                let outcome = match operation.state {
                    FlightState::Failed => "it failed",
                    _ => "its work has not ended",
                };
                let (place, ranks, name) = (place(operation), listed(ranks), named(operation));
                format!("{place}{ranks} have all issued {name}, but {outcome}")
            }
        }
    }

    fn ends(&self) -> impl Iterator<Item = String> {
        self.ends.iter().map(|end| {
            // The rows of a table are said already: its first line is its subject.
            let text = end.text.lines().next().unwrap_or_default().trim_end_matches(':');
            if self.ends.len() == 1 {
                return format!("the world ended: {text}");
            }
            let report = if end.ranks.len() == 1 { "reports" } else { "report" };
            format!("{} {report} that the world ended: {text}", listed(&end.ranks))
        })
    }

    fn slowest(&self) -> Option<String> {
        let Lateness { rank, late, operation } = self.lateness.as_ref()?;
        let (place, name, late) = (place(operation), named(operation), time(*late));
        let often =
            self.often_last.map_or_else(String::new, |OftenLast { rank: last, times, of }| {
                let last = if last == *rank { "it".to_owned() } else { format!("rank {last}") };
                format!("; {last} was most often the last to issue, in {times} of {of}")
            });
        Some(format!("slowest: {place}rank {rank} issued {name} {late} after the others{often}"))
    }

    fn unknown(&self) -> impl Iterator<Item = String> {
        let (without, left_out) = (&self.without_record, &self.left_out);
        let without = (!without.is_empty()).then(|| format!("no record of {}", listed(without)));
        let left_out = (!left_out.is_empty()).then(|| {
            format!("ignored, as older or of another world: a record of {}", listed(left_out))
        });
        let overwritten =
            self.overwritten.iter().map(|(_, entries)| entries).max().map(|entries| {
                let ranks: Vec<Rank> = self.overwritten.iter().map(|(rank, _)| *rank).collect();
                let most = if ranks.len() == 1 { "" } else { "up to " };
                format!(
                    "overwritten in the ring of {}: {most}{entries} older entries",
                    listed(&ranks)
                )
            });
        let partly = (self.partly_known > 0).then(|| {
            let operations = counted(self.partly_known, "operation");
            format!("not all members of {operations} could be compared")
        });
        [without, left_out, overwritten, partly].into_iter().flatten()
    }
}

fn mismatch(operation: &FlightEntry, members: &[MemberFinding]) -> String {
    let (place, FlightEntry { sequence, channel, epoch, .. }) = (place(operation), operation);
    let mut wanted: Vec<(String, Vec<Rank>)> = Vec::new();
    for MemberFinding { rank, presence } in members {
        let text = match presence {
            Presence::Issued(entry) => entry.to_string(),
            other => absence(other),
        };
        match wanted.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => ranks.push(*rank),
            None => wanted.push((text, vec![*rank])),
        }
    }
    let rows: String =
        wanted.iter().map(|(text, ranks)| format!("\n  {}: {text}", listed(ranks))).collect();
    format!(
        "{place}ranks disagree about operation {sequence} on channel {channel}, epoch {epoch}:{rows}"
    )
}

/// The reason why there is no entry.
fn absence(presence: &Presence) -> String {
    match presence {
        Presence::Issued(_) => "has issued it".to_owned(),
        Presence::NoRecord => "no record".to_owned(),
        Presence::Overwritten => "its ring no longer shows it".to_owned(),
        Presence::NotIssued(None) => "has not issued it, nor anything else".to_owned(),
        Presence::NotIssued(Some(LastIssued { operation, ago, waits_in })) => {
            let (last, ago) = (named(operation), time(*ago));
            let waits = waits_in.as_ref().map(|it| format!("; it waits in {} itself", named(it)));
            let waits = waits.unwrap_or_default();
            format!("has not issued it: its last operation was {last}, {ago} ago{waits}")
        }
    }
}

/// The part of a member for which others wait.
fn missed(MemberFinding { rank, presence }: &MemberFinding) -> String {
    match presence {
        Presence::NoRecord => format!("; there is no record of rank {rank}, a member"),
        Presence::Overwritten => {
            format!("; the ring of rank {rank} no longer shows whether it issued it")
        }
        other => format!("; rank {rank} {}", absence(other)),
    }
}

/// `step 7, microbatch 0: `; nothing where a user said nothing.
fn place(FlightEntry { tag, .. }: &FlightEntry) -> String {
    match tag.stage {
        Stage::User if tag.step == 0 && tag.microbatch == 0 => String::new(),
        Stage::Setup => "setup: ".to_owned(),
        _ => format!("step {}, microbatch {}: ", tag.step, tag.microbatch),
    }
}

/// `reduce_scatter of unit 3 (sequence 41)`.
fn named(FlightEntry { op, tag, sequence, peer, .. }: &FlightEntry) -> String {
    let of = match (tag.unit, tag.stage) {
        (Some(unit), _) => format!(" of unit {unit}"),
        (None, Stage::User) => String::new(),
        (None, stage) => format!(" of stage {stage}"),
    };
    let peer = peer.map(|peer| format!(" with rank {peer}")).unwrap_or_default();
    format!("{op}{of}{peer} (sequence {sequence})")
}

/// `rank 1`, `ranks 0, 2, 3`.
fn listed(ranks: &[Rank]) -> String {
    let shown: Vec<String> = ranks.iter().take(LISTED).map(Rank::to_string).collect();
    let shown = shown.join(", ");
    match ranks.len() {
        0 => "no rank".to_owned(),
        1 => format!("rank {shown}"),
        len if len > LISTED => format!("ranks {shown} and {} more", len - LISTED),
        _ => format!("ranks {shown}"),
    }
}

/// A duration with two or three digits that matter.
fn time(duration: Duration) -> String {
    match duration.as_secs_f64() {
        seconds if seconds >= 1.0 => format!("{seconds:.1} s"),
        seconds if seconds >= 1e-3 => format!("{:.0} ms", seconds * 1e3),
        seconds => format!("{:.0} µs", seconds * 1e6),
    }
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
