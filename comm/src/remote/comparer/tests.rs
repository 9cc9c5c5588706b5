//! The comparer of three ranks, without any messages.

use super::*;
use crate::WorldError::{Aborted, Mismatch};
use crate::call::barrier_of;
use crate::engine::judge::{MemberWait, Rolled};
use crate::{Counts, Descriptor};

/// An operation that differs from that of each other group in its count, too.
fn operation(group: u64) -> Arc<Descriptor> {
    let counts = Counts::Each(usize::try_from(group).expect("a small number"));
    Arc::new(Descriptor { counts, ..barrier_of(GroupId::from_hash(group)) })
}

/// A rank that waits for another.
fn waiting(group: u64, missing: usize) -> RankState {
    let operation = operation(group);
    let missing = vec![Rank::new(missing)];
    let members = MemberWait { operation, index: None, missing, is_of_issuer: true };
    RankState { waits: vec![Wait::Members(members)], ..RankState::default() }
}

fn report(urgency: Urgency, group: u64) -> WaitReport {
    WaitReport { urgency, wait: WaitKey::new(&operation(group), None) }
}

fn all() -> Vec<Rank> {
    [0, 1, 2].map(Rank::new).to_vec()
}

/// A comparer, and the time.
struct Test {
    comparer: Comparer,
    now: Instant,
}

impl Test {
    fn new() -> Self {
        Self { comparer: Comparer::default(), now: Instant::now() }
    }

    fn turn(&mut self) -> Vec<ComparerAction> {
        self.comparer.turn(self.now, all)
    }

    /// The question with which a look begins.
    fn begins(&mut self) -> Question {
        let actions = self.turn();
        assert_eq!(actions.len(), 3, "{actions:?}");
        let [ComparerAction::Say(_, Compared::Question(question)), ..] = &actions[..] else {
            panic!("{actions:?}")
        };
        *question
    }

    /// The deeds of the comparer when all ranks have answered.
    fn answered(&mut self, question: Question, states: [RankState; 3]) -> Vec<ComparerAction> {
        for (rank, state) in (0..).map(Rank::new).zip(states) {
            self.comparer.answer(rank, question.number, state);
        }
        self.turn()
    }
}

fn verdict(rank: usize, group: u64, culprit: Option<usize>) -> ComparerAction {
    let wait = WaitKey::new(&operation(group), None);
    let culprit = culprit.map(Rank::new);
    ComparerAction::Say(Rank::new(rank), Compared::Verdict(WaitVerdict { wait, culprit }))
}

#[test]
fn a_rank_that_reports_is_told_the_culprit() {
    let mut test = Test::new();
    assert!(test.turn().is_empty() && !test.comparer.is_busy(), "no rank is asked without need");
    test.comparer.reports.push((Rank::new(0), report(Urgency::Late, 0)));
    let question = test.begins();
    assert!(test.turn().is_empty(), "answers are waited for");
    let states = || [waiting(0, 1), waiting(1, 2), RankState::default()];
    assert_eq!(test.answered(question, states()), [verdict(0, 0, Some(2))]);
    assert!(test.turn().is_empty() && !test.comparer.is_busy());
}

#[test]
fn ranks_that_wait_for_each_other_end_the_world_after_two_looks() {
    let ring = || [waiting(0, 1), waiting(1, 0), RankState::default()];
    let mut test = Test::new();
    test.comparer.reports.push((Rank::new(0), report(Urgency::Stalled, 0)));
    let question = test.begins();
    assert_eq!(test.answered(question, ring()), [verdict(0, 0, Some(0))]);
    assert!(test.comparer.is_busy() && test.turn().is_empty(), "it looks again, but not at once");
    test.now += GAP;
    let question = test.begins();
    let actions = test.answered(question, ring());
    let [ComparerAction::End(Error::World(Mismatch(table)))] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(table.rows.iter().map(|row| row.rank.index()).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn circles_are_looked_for_only_if_a_rank_is_stalled() {
    let ring = || [waiting(0, 1), waiting(1, 0), RankState::default()];
    for urgency in [Urgency::Late, Urgency::Deadline] {
        let mut test = Test::new();
        for _ in 0..3 {
            test.comparer.reports.push((Rank::new(0), report(urgency, 0)));
            test.now += GAP;
            let question = test.begins();
            assert_eq!(test.answered(question, ring()), [verdict(0, 0, Some(0))]);
        }
    }
}

#[test]
fn a_rank_that_does_not_answer_is_waited_for_and_then_it_is_the_culprit() {
    let mut test = Test::new();
    test.comparer.reports.push((Rank::new(0), report(Urgency::Deadline, 0)));
    let number = test.begins().number;
    test.comparer.answer(Rank::new(0), number, waiting(0, 1));
    test.comparer.answer(Rank::new(1), number, waiting(1, 2));
    test.comparer.answer(Rank::new(2), number - 1, waiting(2, 0));
    assert!(test.turn().is_empty(), "the answer to another question is none");
    test.now += PATIENCE;
    assert_eq!(test.turn(), [verdict(0, 0, Some(2))]);
}

#[test]
fn looks_are_apart_but_at_a_deadline() {
    let mut test = Test::new();
    let states = || [waiting(0, 1), RankState::default(), RankState::default()];
    test.comparer.reports.push((Rank::new(0), report(Urgency::Stalled, 0)));
    let question = test.begins();
    test.comparer.reports.push((Rank::new(0), report(Urgency::Stalled, 0)));
    assert_eq!(test.answered(question, states()), [verdict(0, 0, Some(1))]);
    assert!(test.turn().is_empty());
    test.comparer.reports.push((Rank::new(0), report(Urgency::Deadline, 0)));
    let question = test.begins();
    assert_eq!(test.answered(question, states()).len(), 2, "both are told");
}

#[test]
fn the_last_state_of_a_rank_that_left_is_a_part_of_each_look() {
    let mut test = Test::new();
    let there = || [0, 1].map(Rank::new).to_vec();
    let left = RankState { has_left: true, step: 7, ..RankState::default() };
    test.comparer.left.insert(Rank::new(2), left);
    test.comparer.reports.push((Rank::new(0), report(Urgency::Late, 0)));
    let mut last = Vec::new();
    for _ in 0..2 {
        assert_eq!(test.comparer.turn(test.now, there).len(), 2);
        for rank in there() {
            test.comparer.answer(rank, test.comparer.number, waiting(0, 2));
        }
        last = test.comparer.turn(test.now, there);
        test.now += GAP;
    }
    let [ComparerAction::End(Error::World(Aborted { rank, step: 7, reason, .. }))] = &last[..]
    else {
        panic!("{last:?}")
    };
    assert_eq!(*rank, Rank::new(2));
    assert_eq!(*reason, AbortReason::Left { awaited: operation(0) });
}

/// A rank that has made calls of NCCL with these hashes, and waits in the first of them or in none.
fn called(hashes: &[(u64, u128)], entry: Option<u64>, waits: bool) -> RankState {
    let count = hashes.last().map_or(0, |(index, _)| index + 1);
    let hashes = hashes.iter().copied().collect();
    let rolled = Rolled { count, hashes, entry: entry.map(operation), last: None };
    let rolled = [(GroupId::from_hash(9), rolled)].into();
    let missing = all();
    let members =
        MemberWait { operation: operation(9), index: Some(0), missing, is_of_issuer: false };
    let waits = waits.then_some(Wait::Members(members)).into_iter().collect();
    RankState { rolled, waits, ..RankState::default() }
}

#[test]
fn calls_of_nccl_that_differ_are_told_in_a_table_of_the_first() {
    let mut test = Test::new();
    let group = GroupId::from_hash(9);
    test.comparer.reports.push((Rank::new(0), report(Urgency::Stalled, 9)));
    let question = test.begins();
    assert_eq!(question.hashes, Hashes::Last);
    // Rank 2 has made one call less: nothing can be compared yet.
    let last = [
        called(&[(7, 70)], None, true),
        called(&[(7, 70)], None, false),
        called(&[(6, 6)], None, false),
    ];
    assert_eq!(test.answered(question, last).len(), 1, "the verdict");
    test.now += GAP;
    let question = test.begins();
    assert_eq!(question.hashes, Hashes::All(group));
    let calls = |fifth| called(&[(4, 40), (5, fifth), (6, 60 + fifth)], None, true);
    assert_eq!(test.answered(question, [calls(50), calls(50), calls(51)]), []);
    let question = test.begins();
    assert_eq!(question.hashes, Hashes::Entry(group, 5), "at once");
    let entry = |entry| called(&[(4, 0), (5, 0)], Some(entry), true);
    let actions = test.answered(question, [entry(1), entry(1), entry(2)]);
    let [ComparerAction::End(Error::World(Mismatch(table)))] = &actions[..] else {
        panic!("{actions:?}")
    };
    let arrived = [1, 1, 2].map(|entry| Wanted::Arrived(operation(entry)));
    assert_eq!(table.rows.iter().map(|row| row.wanted.clone()).collect::<Vec<_>>(), arrived);
    assert!(
        table.problem.starts_with("ranks disagree about operation 0 on channel user"),
        "{table}"
    );
}

#[test]
fn calls_of_nccl_that_differ_at_equal_counts_need_no_second_look() {
    let mut test = Test::new();
    let group = GroupId::from_hash(9);
    test.comparer.reports.push((Rank::new(0), report(Urgency::Late, 9)));
    let question = test.begins();
    let last = |hash| called(&[(7, hash)], None, true);
    assert_eq!(test.answered(question, [last(1), last(1), last(2)]).len(), 1);
    assert_eq!(test.begins().hashes, Hashes::All(group), "at once");
}
