//! An explanation as a person would give it.

use std::fmt;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{Explanation, Finding, FlightEntry, LastIssued, MemberFinding, Presence};
use crate::Stage;

/// More ranks than these are counted, not listed.
const LISTED: usize = 16;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.size == 0 {
            return f.write_str("there is no record");
        }
        self.write_finding(f)?;
        self.write_ends(f)?;
        self.write_slowest(f)?;
        self.write_unknown(f)
    }
}

impl Explanation {
    fn write_finding(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.finding {
            Finding::Nothing => write!(
                f,
                "all ranks agree; {} of {} compared, and no rank waits in vain",
                counted(self.compared, "operation"),
                counted(self.size, "rank"),
            ),
            Finding::Mismatch { operation, members } => write_mismatch(f, operation, members),
            Finding::Missing { operation, waiting, waited, absent } => {
                let (place, operation) = (Place(operation), Named(operation));
                let one = waiting.len() == 1;
                let ranks = Ranks(waiting);
                match waited {
                    Some(waited) => {
                        let wait = if one { "waits" } else { "wait" };
                        write!(f, "{place}{ranks} {wait} in {operation}, for {}", Time(*waited))?;
                    }
                    None => {
                        let have = if one { "has" } else { "have" };
                        write!(f, "{place}{ranks} {have} issued {operation}")?;
                    }
                }
                absent.iter().try_for_each(|member| write!(f, "; {}", Missed(member)))
            }
            Finding::Unfinished { operation, ranks } => {
                let (place, operation, state) =
                    (Place(operation), Named(operation), operation.state);
                let outcome = match state {
                    super::FlightState::Failed => "it failed",
                    _ => "its work has not ended",
                };
                write!(f, "{place}{} have all issued {operation}, but {outcome}", Ranks(ranks))
            }
        }
    }

    fn write_ends(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for end in &self.ends {
            // Of a table, what it is about: its rows are said already.
            let text = end.text.lines().next().unwrap_or_default().trim_end_matches(':');
            match self.ends.len() {
                1 => write!(f, "\nthe world ended: {text}")?,
                _ => {
                    let report = if end.ranks.len() == 1 { "reports" } else { "report" };
                    write!(f, "\n{} {report} that the world ended: {text}", Ranks(&end.ranks))?;
                }
            }
        }
        Ok(())
    }

    fn write_slowest(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(slowest) = &self.lateness else { return Ok(()) };
        let (operation, late, rank) = (&slowest.operation, Time(slowest.late), slowest.rank);
        write!(f, "\nslowest: {}rank {rank} issued {}", Place(operation), Named(operation))?;
        write!(f, " {late} after the others")?;
        let Some(often) = self.often_last else { return Ok(()) };
        let who = if often.rank == rank { "it".to_owned() } else { format!("rank {}", often.rank) };
        write!(f, "; {who} was most often the last to issue, in {} of {}", often.times, often.of)
    }

    fn write_unknown(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.without_record.is_empty() {
            write!(f, "\nno record of {}", Ranks(&self.without_record))?;
        }
        if !self.left_out.is_empty() {
            write!(
                f,
                "\nignored, as older or of another world: a record of {}",
                Ranks(&self.left_out)
            )?;
        }
        if !self.overwritten.is_empty() {
            let ranks: Vec<Rank> = self.overwritten.iter().map(|(rank, _)| *rank).collect();
            let entries: u64 =
                self.overwritten.iter().map(|(_, entries)| *entries).max().unwrap_or(0);
            let most = if ranks.len() == 1 { "" } else { "up to " };
            write!(
                f,
                "\noverwritten in the ring of {}: {most}{entries} older entries",
                Ranks(&ranks)
            )?;
        }
        if self.partly_known > 0 {
            let operations = counted(self.partly_known, "operation");
            write!(f, "\nnot all members of {operations} could be compared")?;
        }
        Ok(())
    }
}

fn write_mismatch(
    f: &mut fmt::Formatter<'_>,
    operation: &FlightEntry,
    members: &[MemberFinding],
) -> fmt::Result {
    let (place, FlightEntry { sequence, channel, epoch, .. }) = (Place(operation), operation);
    write!(
        f,
        "{place}ranks disagree about operation {sequence} on channel {channel}, epoch {epoch}:"
    )?;
    let mut wanted: Vec<(String, Vec<Rank>)> = Vec::new();
    for member in members {
        let text = match &member.presence {
            Presence::Issued(entry) => entry.to_string(),
            other => absence(other),
        };
        match wanted.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => ranks.push(member.rank),
            None => wanted.push((text, vec![member.rank])),
        }
    }
    wanted.iter().try_for_each(|(text, ranks)| write!(f, "\n  {}: {text}", Ranks(ranks)))
}

/// Why there is no entry.
fn absence(presence: &Presence) -> String {
    match presence {
        Presence::Issued(_) => "has issued it".to_owned(),
        Presence::NoRecord => "no record".to_owned(),
        Presence::Overwritten => "its ring no longer shows it".to_owned(),
        Presence::NotIssued(None) => "has not issued it, nor anything else".to_owned(),
        Presence::NotIssued(Some(last)) => {
            let LastIssued { operation, ago, waits_in } = last;
            let (operation, ago) = (Named(operation), Time(*ago));
            let mut text =
                format!("has not issued it: its last operation was {operation}, {ago} ago");
            if let Some(other) = waits_in {
                text.push_str(&format!("; it waits in {} itself", Named(other)));
            }
            text
        }
    }
}

/// What is said of a member for which others wait.
struct Missed<'a>(&'a MemberFinding);

impl fmt::Display for Missed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemberFinding { rank, presence } = self.0;
        match presence {
            Presence::NoRecord => write!(f, "there is no record of rank {rank}, a member"),
            Presence::Overwritten => {
                write!(f, "the ring of rank {rank} no longer shows whether it issued it")
            }
            other => write!(f, "rank {rank} {}", absence(other)),
        }
    }
}

/// `step 7, microbatch 0: `; nothing where a user said nothing.
struct Place<'a>(&'a FlightEntry);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tag = self.0.tag;
        match tag.stage {
            Stage::User if tag.step == 0 && tag.microbatch == 0 => Ok(()),
            Stage::Setup => f.write_str("setup: "),
            _ => write!(f, "step {}, microbatch {}: ", tag.step, tag.microbatch),
        }
    }
}

/// `reduce_scatter of unit 3 (sequence 41)`.
struct Named<'a>(&'a FlightEntry);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FlightEntry { op, tag, sequence, peer, .. } = self.0;
        write!(f, "{op}")?;
        match (tag.unit, tag.stage) {
            (Some(unit), _) => write!(f, " of unit {}", unit.index())?,
            (None, Stage::User) => {}
            (None, stage) => write!(f, " of stage {stage}")?,
        }
        if let Some(peer) = peer {
            write!(f, " with rank {peer}")?;
        }
        write!(f, " (sequence {sequence})")
    }
}

/// `rank 1`, `ranks 0, 2, 3`.
struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => return f.write_str("no rank"),
            [rank] => return write!(f, "rank {rank}"),
            [first, ..] => write!(f, "ranks {first}")?,
        }
        let listed = self.0.iter().take(LISTED).skip(1);
        listed.into_iter().try_for_each(|rank| write!(f, ", {rank}"))?;
        match self.0.len().saturating_sub(LISTED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// A duration with two or three digits that matter.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        match seconds {
            _ if seconds >= 1.0 => write!(f, "{seconds:.1} s"),
            _ if seconds >= 1e-3 => write!(f, "{:.0} ms", seconds * 1e3),
            _ => write!(f, "{:.0} µs", seconds * 1e6),
        }
    }
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
