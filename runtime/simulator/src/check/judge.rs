//! The fixed point: all operations that complete, whatever the timing.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use hsdp_sharding::Rank;

use super::explanation;
use super::schedules::{ListEnd, ListedAction, Schedules};

/// Decides whether all operations of some schedules complete. The verdict holds for every timing:
/// CHECK.md has the proof.
///
/// A mismatch that is reached wins over a deadlock. In a world that was cut off, operations that
/// some rank had not issued are a deadlock only if the host of a rank waits because of them, and
/// calls that differ are a mismatch before the other members have come. Takes time and memory in
/// proportion to the actions.
#[must_use]
pub fn judge(schedules: &Schedules) -> ScheduleVerdict {
    let mut run = JudgeRun::new(schedules);
    run.run_to_the_end();
    if let Some(mismatch) = run.mismatch() {
        return ScheduleVerdict::Mismatch(mismatch);
    }
    let ranks = run.stuck();
    if ranks.is_empty() {
        return ScheduleVerdict::Ok;
    }
    let (operations, explanation) = explanation::shortest(&run);
    ScheduleVerdict::Deadlock(Deadlock { ranks, operations, explanation })
}

/// An action that issues an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IssuedAt {
    pub(super) rank: Rank,
    pub(super) index: usize,
    pub(super) operation: u32,
    call: u32,
    stream: u32,
}

/// The state of all ranks.
pub(super) struct JudgeRun<'a> {
    pub(super) schedules: &'a Schedules,
    /// Whether no list ends earlier than its rank.
    pub(super) is_whole: bool,
    /// The places of each operation: those of operation `i` are at `begins[i]..begins[i + 1]`, by
    /// rank.
    places: Vec<IssuedAt>,
    begins: Vec<usize>,
    /// The number of members on which each operation is under way.
    ready: Vec<usize>,
    complete: Vec<bool>,
    /// Operations that are under way on all members, and not complete yet.
    begun: Vec<u32>,
    /// Operations that are under way on all members, which differ.
    mismatched: Vec<u32>,
    /// The next action of each host.
    next: Vec<usize>,
    /// The operations of each stream that are issued and not complete, oldest first.
    streams: Vec<VecDeque<IssuedAt>>,
    /// Number of each rank's heads that are under way, and the other heads by index.
    under_way: Vec<u32>,
    behind: Vec<BTreeMap<usize, IssuedAt>>,
}

impl<'a> JudgeRun<'a> {
    fn new(schedules: &'a Schedules) -> Self {
        let operations = schedules.operations.len();
        let ranks = schedules.hosts.len();
        let (begins, places) = places(schedules);
        Self {
            schedules,
            is_whole: schedules.hosts.iter().all(|host| host.end == ListEnd::Finished),
            places,
            begins,
            ready: vec![0; operations],
            complete: vec![false; operations],
            begun: Vec::new(),
            mismatched: Vec::new(),
            next: vec![0; ranks],
            streams: vec![VecDeque::new(); schedules.streams.len()],
            under_way: vec![0; ranks],
            behind: vec![BTreeMap::new(); ranks],
        }
    }

    fn run_to_the_end(&mut self) {
        for rank in 0..self.schedules.hosts.len() {
            self.go_on(Rank::new(rank));
        }
        while let Some(operation) = self.begun.pop() {
            self.finish(operation);
        }
    }

    /// Runs the host until it waits for an operation that is not complete, or to its end.
    fn go_on(&mut self, rank: Rank) {
        let schedules = self.schedules;
        let actions = &schedules.hosts[rank.index()].actions;
        while let Some(action) = actions.get(self.next[rank.index()]) {
            let index = self.next[rank.index()];
            match *action {
                ListedAction::Wait { operation, .. } if !self.complete[operation as usize] => {
                    return;
                }
                ListedAction::Wait { .. } => {}
                ListedAction::Issue { operation, call, stream } => {
                    let place = IssuedAt { rank, index, operation, call, stream };
                    let stream = &mut self.streams[stream as usize];
                    stream.push_back(place);
                    if stream.len() == 1 {
                        self.lead(place);
                        self.fill(rank);
                    }
                }
            }
            self.next[rank.index()] += 1;
        }
    }

    /// Makes the operation the head of its stream.
    fn lead(&mut self, place: IssuedAt) {
        if self.schedules.kernels.is_none() {
            return self.begin(place.operation);
        }
        self.behind[place.rank.index()].insert(place.index, place);
    }

    /// Starts the first heads of a rank, as many as may be under way.
    fn fill(&mut self, rank: Rank) {
        let Some(kernels) = self.schedules.kernels else { return };
        while self.under_way[rank.index()] < kernels.get() {
            let Some((_, place)) = self.behind[rank.index()].pop_first() else { return };
            self.under_way[rank.index()] += 1;
            self.begin(place.operation);
        }
    }

    /// Counts one more member on which the operation is under way.
    fn begin(&mut self, operation: u32) {
        let index = operation as usize;
        self.ready[index] += 1;
        if self.ready[index] == self.members(operation).len() {
            let differs = self.schedules.operations[index].differs;
            if differs { &mut self.mismatched } else { &mut self.begun }.push(operation);
        }
    }

    /// Completes the operation. On each member another one becomes the head of the stream, and the
    /// host may go on.
    fn finish(&mut self, operation: u32) {
        self.complete[operation as usize] = true;
        for at in self.begins[operation as usize]..self.begins[operation as usize + 1] {
            let IssuedAt { rank, stream, .. } = self.places[at];
            let stream = &mut self.streams[stream as usize];
            stream.pop_front();
            let next = stream.front().copied();
            if self.schedules.kernels.is_some() {
                self.under_way[rank.index()] -= 1;
            }
            next.into_iter().for_each(|place| self.lead(place));
            self.fill(rank);
            self.go_on(rank);
        }
    }

    fn mismatch(&self) -> Option<CallMismatch> {
        let reached = self.mismatched.iter().copied().min();
        let operation = reached.or_else(|| self.early_mismatch())?;
        let mut ranks: BTreeMap<u32, Vec<Rank>> = BTreeMap::new();
        for place in self.places(operation).iter().filter(|place| self.is_issued(place)) {
            ranks.entry(place.call).or_default().push(place.rank);
        }
        let words = |(call, ranks)| (self.schedules.calls[call as usize].clone(), ranks);
        let mut calls: Vec<(ListedCall, Vec<Rank>)> = ranks.into_iter().map(words).collect();
        calls.sort_by_key(|(_, ranks)| ranks[0]);
        Some(CallMismatch { operation: self.schedules.named("operation", operation), calls })
    }

    /// Returns the first operation of which ranks have issued different calls, though others did
    /// not come to it before their records end.
    fn early_mismatch(&self) -> Option<u32> {
        if self.is_whole {
            return None;
        }
        let differs = |operation: &u32| {
            let issued = self.places(*operation).iter().filter(|place| self.is_issued(place));
            let mut calls = issued.map(|place| place.call);
            calls.next().is_some_and(|first| calls.any(|call| call != first))
        };
        (0..).zip(&self.schedules.operations).map(|(operation, _)| operation).find(differs)
    }

    /// Returns the ranks that never come to their end, in ascending order.
    fn stuck(&self) -> Vec<Rank> {
        let hosts = self.schedules.hosts.iter().zip(&self.next);
        let mut stuck: Vec<bool> = hosts.map(|(host, next)| *next < host.actions.len()).collect();
        if self.is_whole {
            self.heads().for_each(|place| stuck[place.rank.index()] = true);
        }
        let ranks = (0..stuck.len()).filter(|rank| stuck[*rank]);
        ranks.map(Rank::new).collect()
    }
}

/// The questions of an explanation.
impl JudgeRun<'_> {
    /// Returns the actions that issue an operation, sooner or later, by rank.
    pub(super) fn places(&self, operation: u32) -> &[IssuedAt] {
        &self.places[self.begins[operation as usize]..self.begins[operation as usize + 1]]
    }

    pub(super) fn members(&self, operation: u32) -> &[Rank] {
        let communicator = self.schedules.operations[operation as usize].communicator;
        &self.schedules.communicators[communicator as usize].ranks
    }

    pub(super) fn is_issued(&self, place: &IssuedAt) -> bool {
        place.index < self.next[place.rank.index()]
    }

    /// Returns the operation for which the host waits forever.
    pub(super) fn waits(&self, rank: Rank) -> Option<u32> {
        match self.schedules.hosts[rank.index()].actions.get(self.next[rank.index()])? {
            ListedAction::Wait { operation, .. } | ListedAction::Issue { operation, .. } => {
                Some(*operation)
            }
        }
    }

    /// Returns the head of the stream of an operation that is issued and not complete.
    pub(super) fn head_before(&self, place: &IssuedAt) -> IssuedAt {
        self.streams[place.stream as usize][0]
    }

    /// Returns the heads of all streams.
    pub(super) fn heads(&self) -> impl Iterator<Item = &IssuedAt> {
        self.streams.iter().filter_map(VecDeque::front)
    }

    /// Returns the head that each rank issued first, which is under way.
    pub(super) fn first_heads(&self) -> Vec<Option<IssuedAt>> {
        let mut first: Vec<Option<IssuedAt>> = vec![None; self.next.len()];
        for head in self.heads() {
            let of_rank = &mut first[head.rank.index()];
            *of_rank = Some(of_rank.filter(|it| it.index < head.index).unwrap_or(*head));
        }
        first
    }

    /// Returns whether a head is not under way, since there are as many as may be.
    pub(super) fn is_behind(&self, place: &IssuedAt) -> bool {
        self.behind[place.rank.index()].contains_key(&place.index)
    }
}

/// Returns the actions that issue operations, in the order of these, with the begin of each
/// operation's.
fn places(schedules: &Schedules) -> (Vec<usize>, Vec<IssuedAt>) {
    let mut begins = vec![0];
    for operation in &schedules.operations {
        begins.push(begins.last().copied().unwrap_or(0) + operation.issuers as usize);
    }
    let nowhere = IssuedAt { rank: Rank::new(0), index: 0, operation: 0, call: 0, stream: 0 };
    let mut places = vec![nowhere; begins.last().copied().unwrap_or(0)];
    let mut free = begins.clone();
    for (rank, host) in schedules.hosts.iter().enumerate() {
        for (index, action) in host.actions.iter().enumerate() {
            if let ListedAction::Issue { operation, call, stream } = *action {
                let rank = Rank::new(rank);
                places[free[operation as usize]] =
                    IssuedAt { rank, index, operation, call, stream };
                free[operation as usize] += 1;
            }
        }
    }
    (begins, places)
}

/// The most different calls of a mismatch that are shown.
const SHOWN_CALLS: usize = 4;

/// Whether all operations of some schedules complete. Displayed as one line: `ok`, or `mismatch:
/// ...`, or `deadlock: ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleVerdict {
    /// Every operation that is issued completes. In a world that was cut off, no rank waits in
    /// vain.
    Ok,
    /// Members issue different calls for one operation.
    Mismatch(CallMismatch),
    /// Some operations never complete.
    Deadlock(Deadlock),
}

/// An operation for which members issue different calls. All that it needs besides completes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallMismatch {
    /// The operation, such as `operation #4 of shard0`: the fifth on that communicator.
    pub operation: String,
    /// The calls, in the order of their first ranks, each with its ranks in ascending order.
    pub calls: Vec<(ListedCall, Vec<Rank>)>,
}

/// Kind, dtype and number of elements of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ListedCall {
    /// The kind of operation.
    pub op: String,
    /// The dtype of its elements; empty if it has none.
    pub dtype: String,
    /// The number of elements.
    pub count: u64,
}

/// Ranks that never come to their end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// The ranks whose host waits forever, or whose operations never complete; in ascending order.
    pub ranks: Vec<Rank>,
    /// The operations of the shortest explanation, such as `all_gather #3 of shard0`. Each waits
    /// for the next one, and the last for the first, or for a rank that never issues it.
    pub operations: Vec<String>,
    /// The shortest explanation, in words.
    pub explanation: String,
}

impl fmt::Display for ScheduleVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::Mismatch(CallMismatch { operation, calls }) => {
                write!(f, "mismatch: {operation}: ")?;
                for (index, (call, ranks)) in calls.iter().take(SHOWN_CALLS).enumerate() {
                    let verb = if ranks.len() == 1 { "issues" } else { "issue" };
                    let comma = if index == 0 { "" } else { ", " };
                    write!(f, "{comma}{} {verb} {call}", listed(ranks))?;
                }
                match calls.len().checked_sub(SHOWN_CALLS + 1) {
                    Some(more) => write!(f, ", and {} other calls", more + 1),
                    None => Ok(()),
                }
            }
            Self::Deadlock(Deadlock { ranks, explanation, .. }) => match &**ranks {
                [rank] => write!(f, "deadlock: rank {rank} is stuck: {explanation}"),
                ranks => write!(f, "deadlock: ranks {} are stuck: {explanation}", ranges(ranks)),
            },
        }
    }
}

/// Displayed as `all_gather f32 1000`.
impl fmt::Display for ListedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, dtype, count } = self;
        match &**dtype {
            "" if *count == 0 => f.write_str(op),
            "" => write!(f, "{op} {count}"),
            dtype => write!(f, "{op} {dtype} {count}"),
        }
    }
}

/// The most ranges that are shown.
const SHOWN_RANGES: usize = 16;

/// `rank 4`, `ranks 0-3, 5`: in their order, consecutive ones as a range. After sixteen ranges the
/// others are counted.
pub(super) fn listed(ranks: &[Rank]) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", ranges(ranks))
}

/// Lists ranks like [`listed`], without the word.
pub(super) fn ranges(ranks: &[Rank]) -> String {
    let runs = ranks.chunk_by(|one, next| one.get().checked_add(1) == Some(next.get()));
    let mut texts = Vec::new();
    let mut left = ranks.len();
    for run in runs.take(SHOWN_RANGES) {
        left -= run.len();
        texts.push(match run {
            [first, .., last] => format!("{first}-{last}"),
            single => single.iter().map(Rank::to_string).collect(),
        });
    }
    let more = if left == 0 { String::new() } else { format!(" and {left} more") };
    texts.join(", ") + &more
}

#[cfg(test)]
mod tests {
    use hsdp_sharding::Rank;

    use super::listed;

    fn of(ranks: impl IntoIterator<Item = usize>) -> String {
        listed(&ranks.into_iter().map(Rank::new).collect::<Vec<_>>())
    }

    #[test]
    fn consecutive_ranks_are_a_range_and_many_ranges_are_counted() {
        assert_eq!(of([4]), "rank 4");
        assert_eq!(of([0, 1, 2, 3, 5]), "ranks 0-3, 5");
        assert_eq!(of(0..10_000), "ranks 0-9999");
        assert_eq!(of([3, 1, 2]), "ranks 3, 1-2");
        let some = "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30";
        assert_eq!(of((0..100).map(|rank| 2 * rank)), format!("{some} and 84 more"));
    }
}
