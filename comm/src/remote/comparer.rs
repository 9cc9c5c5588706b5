//! Compares the states of all ranks where a rank cannot go on. `JUDGE.md`, "The comparer".

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use crate::engine::judge::waiting_for_each_other;
use crate::engine::judge::{self, Finding, Look, RankState, Wait, WaitKey};
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::{AbortReason, Error, GroupId};

/// What ranks and the comparer tell each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Compared {
    Report(Report),
    Question(Question),
    /// The answer to the question of this number.
    State(u64, RankState),
    Verdict(Verdict),
}

/// An alarm of a rank that waits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) urgency: Urgency,
    pub(crate) wait: WaitKey,
}

/// The alarm: ranks that only wait for long are not asked whether they wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Urgency {
    Stalled,
    Late,
    Deadline,
}

/// A question for the state of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Question {
    /// From 0: an answer repeats it.
    pub(crate) number: u64,
    pub(crate) calls: Calls,
}

/// The calls of NCCL of which a state tells the hashes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Calls {
    /// The last of each group.
    Last,
    /// And all of this group.
    All(GroupId),
    /// And of this group the descriptor of the call with this index.
    Entry(GroupId, u64),
}

/// The rank that keeps a wait from ending, if one is known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) wait: WaitKey,
    pub(crate) culprit: Option<Rank>,
}

/// What the comparer is to do.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    Say(Rank, Compared),
    End(Error),
}

/// How long answers are waited for: a rank that is frozen gives none.
const PATIENCE: Duration = Duration::from_millis(250);

/// The time from one look to the next, but for a deadline: with reports and verdicts, no rank has more than ten messages a second.
pub(super) const GAP: Duration = Duration::from_millis(300);

/// The comparer. Each rank has one, and reports go to that of the lowest rank that has not left.
#[derive(Debug, Default)]
pub(super) struct Comparer {
    reports: Vec<(Rank, Report)>,
    /// The last states of ranks that have left.
    left: Look,
    looking: Option<Looking>,
    /// The number of looks.
    number: u64,
    began: Option<Instant>,
    /// The time that the last look took.
    took: Duration,
    /// The last look, and what the next one is to find out.
    before: Look,
    next: Next,
}

/// A look under way.
#[derive(Debug)]
struct Looking {
    since: Instant,
    calls: Calls,
    finds_circles: bool,
    reports: Vec<(Rank, Report)>,
    look: Look,
}

/// The reason for another look without a report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Next {
    #[default]
    Nothing,
    /// Ranks seem to wait for one that has left.
    Left,
    /// Ranks seem to wait for each other.
    Circle,
    /// Ranks have other numbers of calls of NCCL on a group: their hashes can be compared.
    Hashes(GroupId),
    /// Ranks differ in a group; or in the call of this index, and in none before it. The world ends.
    Differ(GroupId, Option<u64>),
}

impl Comparer {
    /// A rank cannot go on.
    pub(super) fn report(&mut self, from: Rank, report: Report) {
        self.reports.push((from, report));
    }

    /// A rank answers a question.
    pub(super) fn answer(&mut self, from: Rank, number: u64, state: RankState) {
        if let Some(looking) = self.looking.as_mut().filter(|_| number == self.number) {
            looking.look.insert(from, state);
        }
    }

    /// A rank has left, with this last state.
    pub(super) fn leave(&mut self, rank: Rank, state: RankState) {
        self.left.insert(rank, state);
    }

    /// Whether there is something to be done soon.
    pub(super) fn is_busy(&self) -> bool {
        self.looking.is_some() || self.next != Next::Nothing || !self.reports.is_empty()
    }

    /// What is to be done now, with the ranks that are `there`.
    pub(super) fn turn(&mut self, now: Instant, there: impl Fn() -> Vec<Rank>) -> Vec<Action> {
        if !self.is_busy() {
            return Vec::new();
        }
        let there = there();
        let is_over = |it: &mut Looking| {
            it.since + PATIENCE <= now || there.iter().all(|rank| it.look.contains_key(rank))
        };
        match self.looking.take_if(is_over) {
            Some(looking) => self.judge(looking, now),
            None if self.looking.is_none() && self.is_due(now) => self.begin(now, &there),
            None => Vec::new(),
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        let is_urgent = |(_, it): &(Rank, Report)| it.urgency == Urgency::Deadline;
        // Where answers take long, the machine has other work to do.
        let gap = if self.next == Next::Nothing { GAP.max(4 * self.took) } else { GAP };
        let has_gap = self.began.is_none_or(|began| began + gap <= now);
        has_gap || matches!(self.next, Next::Differ(..)) || self.reports.iter().any(is_urgent)
    }

    fn begin(&mut self, now: Instant, there: &[Rank]) -> Vec<Action> {
        let calls = match self.next {
            Next::Nothing | Next::Left | Next::Circle => Calls::Last,
            Next::Hashes(group) | Next::Differ(group, None) => Calls::All(group),
            Next::Differ(group, Some(index)) => Calls::Entry(group, index),
        };
        let (reports, look) = (mem::take(&mut self.reports), self.left.clone());
        let is_stalled = |(_, it): &(Rank, Report)| it.urgency == Urgency::Stalled;
        let finds_circles = self.next == Next::Circle || reports.iter().any(is_stalled);
        self.number += 1;
        self.began = Some(now);
        self.looking = Some(Looking { since: now, calls, finds_circles, reports, look });
        let question = Question { number: self.number, calls };
        there.iter().map(|rank| Action::Say(*rank, Compared::Question(question))).collect()
    }

    /// A look is complete, as far as ranks answer.
    fn judge(&mut self, looking: Looking, now: Instant) -> Vec<Action> {
        let before = mem::take(&mut self.before);
        let suspicion = judge::judge(&looking.look, &looking.look);
        let finding = suspicion.as_ref().and_then(|_| judge::judge(&looking.look, &before));
        self.next = looking.next(suspicion.as_ref());
        self.took = now.saturating_duration_since(looking.since);
        let mut actions = looking.verdicts();
        actions.extend(looking.end(finding).map(Action::End));
        self.before = looking.look;
        actions
    }
}

impl Looking {
    fn next(&self, suspicion: Option<&Finding>) -> Next {
        match (suspicion, self.calls) {
            (Some(Finding::Differ(group, index)), Calls::All(asked)) if asked == *group => {
                Next::Differ(*group, Some(*index))
            }
            (Some(Finding::Differ(group, _)), _) => Next::Differ(*group, None),
            (Some(Finding::Left(..)), _) => Next::Left,
            (Some(Finding::Circle(_)), _) if self.finds_circles => Next::Circle,
            (_, Calls::Last) => judge::uneven(&self.look).map_or(Next::Nothing, Next::Hashes),
            _ => Next::Nothing,
        }
    }

    /// The error with which the world ends, if it does.
    fn end(&self, finding: Option<Finding>) -> Option<Error> {
        if let Calls::Entry(group, index) = self.calls {
            return Some(differing(&self.look, group, index));
        }
        match finding? {
            Finding::Left(rank, awaited) => {
                let state = self.look.get(&rank)?;
                let (step, operation) = (state.step, state.last.clone());
                let reason = AbortReason::Left { awaited };
                Some(Error::WorldAborted { rank, step, operation, reason })
            }
            Finding::Circle(rows) if self.finds_circles => Some(waiting_for_each_other(rows)),
            _ => None,
        }
    }

    fn verdicts(&self) -> Vec<Action> {
        let mut culprits = BTreeMap::new();
        let verdict = |(rank, report): &(Rank, Report)| {
            // All that wait for an operation have edges to the same ranks.
            let known = culprits.get(&report.wait).copied();
            let culprit = known.or_else(|| self.culprit(*rank, report.wait));
            culprits.extend(culprit.map(|culprit| (report.wait, culprit)));
            Action::Say(*rank, Compared::Verdict(Verdict { wait: report.wait, culprit }))
        };
        self.reports.iter().map(verdict).collect()
    }

    fn culprit(&self, rank: Rank, wait: WaitKey) -> Option<Rank> {
        let is_it = |it: &&Wait| it.members().is_some_and(|members| members.key() == wait);
        let wait = self.look.get(&rank)?.waits.iter().find(is_it)?;
        judge::culprit(&self.look, rank, wait)
    }
}

/// The error that says that ranks have made other calls of NCCL: with a row for each rank that has called it on the group.
fn differing(look: &Look, group: GroupId, index: u64) -> Error {
    let row = |(rank, state): (&Rank, &RankState)| {
        let wanted = match &state.rolled.get(&group)?.entry {
            Some(entry) => Wanted::Arrived(Arc::clone(entry)),
            None => Wanted::Missing(state.last.clone()),
        };
        Some(MismatchRow { rank: *rank, wanted })
    };
    let rows: Vec<_> = look.iter().filter_map(row).collect();
    let place = rows.iter().find_map(|row| match &row.wanted {
        Wanted::Arrived(descriptor) => Some(descriptor.place().to_string()),
        _ => None,
    });
    let place = place.unwrap_or_else(|| format!("call {index} of NCCL on group {group}"));
    let problem = format!("ranks disagree about {place}");
    Error::CollectiveMismatch { table: Arc::new(Mismatch { problem, rows }) }
}

#[cfg(test)]
mod tests;
