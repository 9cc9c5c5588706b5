//! An explanation in words, one line for each part.

use std::fmt;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{
    Explanation, Finding, LastIssued, Lateness, MemberFinding, OftenLast, Presence, together,
};
use crate::{FlightEntry, FlightState, ModelLabel, Stage};

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
                let compared = counted(self.compared, "operation");
                let size = counted(self.size, "rank");
                format!("all ranks agree; {compared} of {size} compared, and no rank waits in vain")
            }
            Finding::Mismatch { operation, members } => self.mismatch(operation, members),
            Finding::Missing { operation, waiting, waited, absent } => {
                let name = self.named(operation);
                let [wait, have] = match waiting.len() {
                    1 => ["waits", "has"],
                    _ => ["wait", "have"],
                };
                let part = match waited {
                    Some(waited) => format!("{wait} in {name}, for {}", time(*waited)),
                    None => format!("{have} issued {name}"),
                };
                let absent: String = absent.iter().map(|it| self.missed(it)).collect();
                format!("{}{} {part}{absent}", place(operation), listed(waiting))
            }
            Finding::Unfinished { operation, ranks } => {
                let outcome = match operation.state {
                    FlightState::Failed => "it failed",
                    _ => "its work has not ended",
                };
                let place = place(operation);
                let ranks = listed(ranks);
                let name = self.named(operation);
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
        let place = place(operation);
        let name = self.named(operation);
        let late = time(*late);
        let often =
            self.often_last.map_or_else(String::new, |OftenLast { rank: last, times, of }| {
                let last = if last == *rank { "it".to_owned() } else { format!("rank {last}") };
                format!("; {last} was most often the last to issue, in {times} of {of}")
            });
        Some(format!("slowest: {place}rank {rank} issued {name} {late} after the others{often}"))
    }

    fn unknown(&self) -> impl Iterator<Item = String> {
        let of = |text: &str, ranks: &[Rank]| {
            (!ranks.is_empty()).then(|| format!("{text} {}", listed(ranks)))
        };
        let without = of("no record of", &self.without_record);
        let left_out = of("ignored, as older or of another world: a record of", &self.left_out);
        let (ranks, counts): (Vec<Rank>, Vec<u64>) = self.overwritten.iter().copied().unzip();
        let up_to = if ranks.len() == 1 { "" } else { "up to " };
        let ring = of("overwritten in the ring of", &ranks).zip(counts.iter().max());
        let overwritten = ring.map(|(ring, most)| format!("{ring}: {up_to}{most} older entries"));
        let partly = (self.partly_known > 0).then(|| {
            let operations = counted(self.partly_known, "operation");
            format!("not all members of {operations} could be compared")
        });
        [without, left_out, overwritten, partly].into_iter().flatten()
    }

    fn mismatch(&self, operation: &FlightEntry, members: &[MemberFinding]) -> String {
        let place = place(operation);
        let FlightEntry { sequence, channel, epoch, .. } = operation;
        let mut objects = members.iter().filter_map(|member| match &member.presence {
            Presence::Issued(entry) => Some((entry.tag.model, entry.tag.part)),
            _ => None,
        });
        let first = objects.next();
        let is_of_one = objects.all(|object| Some(object) == first);
        let wanted = members.iter().map(|MemberFinding { rank, presence }| match presence {
            Presence::Issued(entry) if is_of_one => (entry.to_string(), *rank),
            Presence::Issued(entry) => (format!("{entry:#}"), *rank),
            other => (self.absence(other), *rank),
        });
        let row = |(text, ranks): (String, Vec<Rank>)| format!("\n  {}: {text}", listed(&ranks));
        let rows: String = together(wanted).map(row).collect();
        format!(
            "{place}ranks disagree about operation {sequence} on channel {channel}, epoch {epoch}:{rows}"
        )
    }

    /// The reason why there is no entry.
    fn absence(&self, presence: &Presence) -> String {
        match presence {
            Presence::Issued(_) => "has issued it".to_owned(),
            Presence::NoRecord => "no record".to_owned(),
            Presence::Overwritten => "its ring no longer shows it".to_owned(),
            Presence::NotIssued(None) => "has not issued it, nor anything else".to_owned(),
            Presence::NotIssued(Some(LastIssued { operation, ago, waits_in })) => {
                let last = self.named(operation);
                let ago = time(*ago);
                let waits =
                    waits_in.as_ref().map(|it| format!("; it waits in {} itself", self.named(it)));
                let waits = waits.unwrap_or_default();
                format!("has not issued it: its last operation was {last}, {ago} ago{waits}")
            }
        }
    }

    /// The part of a member for which others wait.
    fn missed(&self, MemberFinding { rank, presence }: &MemberFinding) -> String {
        match presence {
            Presence::NoRecord => format!("; there is no record of rank {rank}, a member"),
            Presence::Overwritten => {
                format!("; the ring of rank {rank} no longer shows whether it issued it")
            }
            other => format!("; rank {rank} {}", self.absence(other)),
        }
    }

    /// `reduce_scatter of unit 3 (sequence 41)`; with the model where there are several, or if it
    /// has a name.
    fn named(&self, FlightEntry { op, tag, sequence, peer, .. }: &FlightEntry) -> String {
        let of = match (tag.unit, tag.stage) {
            // A unit has two sums and two gathers of these kinds.
            (Some(unit), stage @ (Stage::ScatterSums | Stage::GatherSlices)) => {
                format!(" of unit {unit}, stage {stage},")
            }
            (Some(unit), _) => format!(" of unit {unit}"),
            (None, Stage::User) => String::new(),
            (None, Stage::Export) => " of a checkpoint, an import, an export or norms".to_owned(),
            (None, stage) => format!(" of stage {stage}"),
        };
        let is_shown = |it: &ModelLabel| self.models.len() > 1 || it.name.is_some();
        let model = tag.model.filter(is_shown).map(|it| format!(" of {it}")).unwrap_or_default();
        let peer = peer.map(|peer| format!(" with rank {peer}")).unwrap_or_default();
        format!("{op}{of}{model}{peer} (sequence {sequence})")
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
