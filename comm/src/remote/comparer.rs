//! Compares the states of all ranks where a rank cannot go on. `JUDGE.md`, "The comparer".

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use crate::engine::Record;
use crate::engine::judge::{
    self, JudgeFinding, Look, RankState, Rolled, Wait, WaitKey, waiting_for_each_other,
};
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::rolling::{RolledCall, Rolling};
use crate::{AbortReason, Descriptor, Error, GroupId, WorldError, sync};

/// A message between ranks and the comparer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Compared {
    Report(WaitReport),
    Question(Question),
    /// The answer to the question of this number.
    State(u64, RankState),
    Verdict(WaitVerdict),
    /// Ranks differ in calls of NCCL: the first difference is to be found.
    Differ,
}

/// An alarm of a rank that waits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WaitReport {
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
    pub(crate) hashes: Hashes,
}

/// The calls of NCCL of which a state tells the hashes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Hashes {
    /// The last of each group.
    Last,
    /// And all of this group.
    All(GroupId),
    /// And of this group the descriptor of the call with this index.
    Entry(GroupId, u64),
}

/// The rank that keeps a wait from ending, if one is known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WaitVerdict {
    pub(crate) wait: WaitKey,
    pub(crate) culprit: Option<Rank>,
}

/// A deed of the comparer.
#[derive(Debug, PartialEq)]
pub(super) enum ComparerAction {
    Say(Rank, Compared),
    End(Error),
}

/// The longest wait for answers: a rank that is frozen gives none.
const PATIENCE: Duration = Duration::from_millis(250);

/// The time from one look to the next, but for a deadline: with reports and verdicts, no rank has
/// more than ten messages a second.
pub(super) const GAP: Duration = Duration::from_millis(300);

/// The comparer. Each rank has one, and reports go to that of the lowest rank that has not left.
#[derive(Debug, Default)]
pub(super) struct Comparer {
    /// Of ranks that cannot go on.
    pub(super) reports: Vec<(Rank, WaitReport)>,
    /// The last states of ranks that have left.
    pub(super) left: Look,
    looking: Option<Looking>,
    /// The number of looks.
    number: u64,
    began: Option<Instant>,
    /// Whether ranks know that they differ in calls of NCCL. Never falls back, since that ends the
    /// world.
    pub(super) differs: bool,
    /// The time that the last look took.
    took: Duration,
    /// The last look, and the reason for the next one.
    before: Look,
    next: Next,
}

/// A look under way.
#[derive(Debug)]
struct Looking {
    since: Instant,
    hashes: Hashes,
    finds_circles: bool,
    differs: bool,
    reports: Vec<(Rank, WaitReport)>,
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
    /// Ranks differ in a group; or in the call of this index, and in none before it. The world
    /// ends.
    Differ(GroupId, Option<u64>),
}

impl Comparer {
    /// A rank answers a question.
    pub(super) fn answer(&mut self, from: Rank, number: u64, state: RankState) {
        if let Some(looking) = self.looking.as_mut().filter(|_| number == self.number) {
            looking.look.insert(from, state);
        }
    }

    /// Whether there is something to be done soon.
    pub(super) fn is_busy(&self) -> bool {
        self.looking.is_some()
            || self.next != Next::Nothing
            || self.differs
            || !self.reports.is_empty()
    }

    /// The deeds that are due now, with the ranks that are `there`.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        there: impl Fn() -> Vec<Rank>,
    ) -> Vec<ComparerAction> {
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
        let is_urgent = |(_, it): &(Rank, WaitReport)| it.urgency == Urgency::Deadline;
        // Where answers take long, the machine has other work to do.
        let gap = if self.next == Next::Nothing { GAP.max(4 * self.took) } else { GAP };
        let has_gap = self.began.is_none_or(|began| began + gap <= now);
        let is_urgent = self.differs || self.reports.iter().any(is_urgent);
        has_gap || is_urgent || matches!(self.next, Next::Differ(..))
    }

    fn begin(&mut self, now: Instant, there: &[Rank]) -> Vec<ComparerAction> {
        let hashes = match self.next {
            Next::Nothing | Next::Left | Next::Circle => Hashes::Last,
            Next::Hashes(group) | Next::Differ(group, None) => Hashes::All(group),
            Next::Differ(group, Some(index)) => Hashes::Entry(group, index),
        };
        let reports = mem::take(&mut self.reports);
        let look = self.left.clone();
        let is_stalled = |(_, it): &(Rank, WaitReport)| it.urgency == Urgency::Stalled;
        let finds_circles = self.next == Next::Circle || reports.iter().any(is_stalled);
        self.number += 1;
        self.began = Some(now);
        let differs = self.differs;
        self.looking = Some(Looking { since: now, hashes, finds_circles, differs, reports, look });
        let question = Question { number: self.number, hashes };
        there.iter().map(|rank| ComparerAction::Say(*rank, Compared::Question(question))).collect()
    }

    /// A look is complete, as far as ranks answer.
    fn judge(&mut self, looking: Looking, now: Instant) -> Vec<ComparerAction> {
        let before = mem::take(&mut self.before);
        let suspicion = judge::judge(&looking.look, &looking.look);
        let finding = suspicion.as_ref().and_then(|_| judge::judge(&looking.look, &before));
        self.next = looking.next(suspicion.as_ref());
        self.took = now.saturating_duration_since(looking.since);
        let mut actions = looking.verdicts();
        // Ranks differ, and nothing shows it any more.
        let is_vain = looking.differs && self.next == Next::Nothing;
        let vain = is_vain.then(|| mismatch(NOT_KEPT.to_owned(), Vec::new()));
        actions.extend(looking.end(finding).or(vain).map(ComparerAction::End));
        self.before = looking.look;
        actions
    }
}

impl Looking {
    fn next(&self, suspicion: Option<&JudgeFinding>) -> Next {
        match (suspicion, self.hashes) {
            (Some(JudgeFinding::Differ(group, index)), Hashes::All(asked)) if asked == *group => {
                Next::Differ(*group, Some(*index))
            }
            // Ranks agree as far as all have made calls.
            (_, Hashes::All(group)) if self.differs => Next::Differ(group, self.fewest(group)),
            (Some(JudgeFinding::Differ(group, _)), _) => Next::Differ(*group, None),
            (Some(JudgeFinding::Left(..)), _) => Next::Left,
            (Some(JudgeFinding::Circle(_)), _) if self.finds_circles => Next::Circle,
            (_, Hashes::Last) => self.uneven().map_or(Next::Nothing, Next::Hashes),
            _ => Next::Nothing,
        }
    }

    /// A group in which ranks have other numbers of calls, and in which a device waits, or which
    /// may differ.
    fn uneven(&self) -> Option<GroupId> {
        match self.differs {
            true => judge::uneven(&self.look, judge::known(&self.look)),
            false => judge::uneven(&self.look, judge::awaited(&self.look)),
        }
    }

    /// The index of the first call of a group that a rank has not made.
    fn fewest(&self, group: GroupId) -> Option<u64> {
        let counts = self.look.values().filter_map(|it| it.rolled.get(&group)).map(|it| it.count);
        counts.min()
    }

    /// The error with which the world ends, if it does.
    fn end(&self, finding: Option<JudgeFinding>) -> Option<Error> {
        if let Hashes::Entry(group, index) = self.hashes {
            return Some(differing(&self.look, group, index));
        }
        match finding? {
            JudgeFinding::Left(rank, awaited) => {
                let state = self.look.get(&rank)?;
                let step = state.step;
                let operation = state.last.clone();
                let reason = AbortReason::Left { awaited };
                Some(WorldError::Aborted { rank, step, operation, reason }.into())
            }
            JudgeFinding::Circle(rows) if self.finds_circles => Some(waiting_for_each_other(rows)),
            _ => None,
        }
    }

    fn verdicts(&self) -> Vec<ComparerAction> {
        let mut culprits = BTreeMap::new();
        let verdict = |(rank, report): &(Rank, WaitReport)| {
            // All that wait for an operation have edges to the same ranks.
            let known = culprits.get(&report.wait).copied();
            let culprit = known.or_else(|| self.culprit(*rank, report.wait));
            culprits.extend(culprit.map(|culprit| (report.wait, culprit)));
            ComparerAction::Say(
                *rank,
                Compared::Verdict(WaitVerdict { wait: report.wait, culprit }),
            )
        };
        self.reports.iter().map(verdict).collect()
    }

    fn culprit(&self, rank: Rank, wait: WaitKey) -> Option<Rank> {
        let is_it = |it: &&Wait| it.members().is_some_and(|members| members.key() == wait);
        let wait = self.look.get(&rank)?.waits.iter().find(is_it)?;
        judge::culprit(&self.look, rank, wait)
    }
}

/// The problem of ranks whose calls of NCCL differ, where none of them describes one.
const NOT_KEPT: &str = "ranks disagree about operations that no rank keeps any more";

fn mismatch(problem: String, rows: Vec<MismatchRow>) -> Error {
    WorldError::Mismatch(Arc::new(Mismatch { problem, rows })).into()
}

/// The error that says that ranks have made other calls of NCCL: with a row for each rank that
/// knows the group.
fn differing(look: &Look, group: GroupId, index: u64) -> Error {
    let known = look.iter().filter_map(|(rank, state)| Some((*rank, state.rolled.get(&group)?)));
    let row = |(rank, it): (Rank, &Rolled)| {
        let arrived = it.entry.clone().map(Wanted::Arrived);
        MismatchRow { rank, wanted: arrived.unwrap_or_else(|| Wanted::Missing(it.last.clone())) }
    };
    let called: Vec<_> = known.clone().map(|(_, it)| it.entry.as_ref()).collect();
    // The first call whose hash all of them keep.
    let first = known.clone().filter_map(|(_, it)| it.hashes.keys().next()).max();
    let is_past = index > 0 && first == Some(&index);
    let problem = match called.iter().copied().flatten().next() {
        None => NOT_KEPT.to_owned(),
        Some(one) if is_past => {
            let place = one.place();
            format!("ranks disagree about an operation before {place}, the first that all keep")
        }
        Some(one) => {
            let is_same = |it: &Arc<Descriptor>| it.agrees_with(one) && it.place() == one.place();
            let what = match called.iter().all(|it| it.is_some_and(is_same)) {
                true => "have different layouts of one unit, or call different functions, in",
                false => "disagree about",
            };
            format!("ranks {what} {}", one.place())
        }
    };
    mismatch(problem, known.map(row).collect())
}

/// The calls of NCCL of a rank, with the hashes that are asked for.
pub(super) fn rolled(rolling: &Rolling, asked: Hashes) -> BTreeMap<GroupId, Rolled> {
    let of = |(group, kept): (GroupId, Vec<RolledCall>)| {
        let (all, asked) = match asked {
            Hashes::All(asked) if asked == group => (&kept[..], None),
            Hashes::Entry(asked, index) if asked == group => {
                (kept.get(..1).unwrap_or(&[]), Some(index))
            }
            _ => (&[][..], None),
        };
        let hashed = all.iter().chain(kept.last());
        let hashes = hashed.map(|it| (it.index, u128::from_le_bytes(it.hash))).collect();
        let called = |entry: &RolledCall| entry.descriptor.clone();
        let entry = kept.iter().find(|entry| Some(entry.index) == asked).and_then(called);
        let last = asked.and_then(|_| kept.iter().rev().find_map(called));
        let count = kept.last().map_or(0, |last| last.index + 1);
        (group, Rolled { count, hashes, entry, last })
    };
    rolling.kept().into_iter().map(of).collect()
}

/// The error of ranks that share memory, and differ in calls of NCCL: that which a comparer of
/// their states finds.
pub(crate) fn find_difference(records: &[Arc<Record>]) -> Error {
    let mut comparer = Comparer { differs: true, ..Comparer::default() };
    let now = sync::now();
    loop {
        let all = || (0..records.len()).map(Rank::new).collect();
        for action in comparer.turn(now, all) {
            match action {
                ComparerAction::Say(rank, Compared::Question(Question { number, hashes })) => {
                    let rolled = rolled(&records[rank.index()].rolling, hashes);
                    comparer.answer(rank, number, RankState { rolled, ..RankState::default() });
                }
                ComparerAction::Say(..) => {}
                ComparerAction::End(error) => return error,
            }
        }
    }
}

#[cfg(test)]
mod tests;
