//! One rule of the judge after the other.

mod graphs;
mod programs;

use super::*;
use crate::call::barrier_of;
use crate::mismatch::Wanted;

/// The first operation of a group that has this number and no other meaning.
pub(super) fn operation(group: u64, epoch: u64) -> Arc<Descriptor> {
    Arc::new(Descriptor { epoch, ..barrier_of(GroupId::from_hash(group)) })
}

pub(super) fn ranks(numbers: &[usize]) -> Vec<Rank> {
    numbers.iter().copied().map(Rank::new).collect()
}

/// A wait of the only thread that issues.
fn wait(group: u64, missing: &[usize]) -> MemberWait {
    let operation = operation(group, 0);
    MemberWait { operation, index: None, missing: ranks(missing), is_of_issuer: true }
}

/// The state of a rank that has issued nothing but the operation for which it waits.
fn waiting(members: MemberWait) -> RankState {
    let mut state = RankState { epoch: members.operation.epoch, ..RankState::default() };
    state.issued.note(&members.operation);
    state.waits.push(Wait::Members(members));
    state
}

fn look(states: impl IntoIterator<Item = RankState>) -> Look {
    (0..).map(Rank::new).zip(states).collect()
}

/// Rank 0 waits for 1, 1 for 2, and 2 for 0.
fn ring() -> Look {
    look([wait(0, &[1]), wait(1, &[2]), wait(2, &[0])].map(waiting))
}

fn still(look: &Look) -> Option<JudgeFinding> {
    judge(look, look)
}

/// By row: a rank, and those for which it waits.
fn circle_of(finding: Option<JudgeFinding>) -> Vec<(usize, Vec<Rank>)> {
    let Some(JudgeFinding::Circle(rows)) = finding else { panic!("{finding:?}") };
    let row = |MismatchRow { rank, wanted }| match wanted {
        Wanted::Waiting { missing, .. } => (rank.index(), missing),
        other => panic!("{other:?}"),
    };
    rows.into_iter().map(row).collect()
}

#[test]
fn ranks_that_wait_for_each_other_are_a_circle_in_two_looks() {
    let look = ring();
    let rows = [(0, ranks(&[1])), (1, ranks(&[2])), (2, ranks(&[0]))];
    assert_eq!(circle_of(still(&look)), rows);
    assert_eq!(judge(&look, &Look::new()), None, "one look shows no moment at which all waited");
    let mut moved = look.clone();
    moved.insert(Rank::new(1), waiting(wait(7, &[2])));
    assert_eq!(judge(&look, &moved), None);
    assert_eq!(judge(&moved, &look), None);
}

#[test]
fn ranks_that_wait_for_a_circle_are_listed_and_others_are_not() {
    let mut look = ring();
    // 3 waits for the circle; 0 also for 4, which computes; 5 waits for 4 alone.
    look.insert(Rank::new(3), waiting(wait(3, &[1, 4])));
    look.insert(Rank::new(0), waiting(wait(0, &[1, 4])));
    look.insert(Rank::new(4), RankState::default());
    look.insert(Rank::new(5), waiting(wait(5, &[4])));
    let both = ranks(&[1, 4]);
    let rows = [(0, both.clone()), (1, ranks(&[2])), (2, ranks(&[0])), (3, both)];
    assert_eq!(circle_of(still(&look)), rows);
}

#[test]
fn a_rank_that_waits_for_itself_is_a_circle() {
    assert_eq!(circle_of(still(&look([waiting(wait(0, &[0]))]))), [(0, ranks(&[0]))]);
}

/// Each of these ends by itself, or may.
#[test]
fn one_rank_that_may_go_on_breaks_a_circle() {
    let change = |change: &dyn Fn(&mut RankState)| {
        let mut look = ring();
        change(look.get_mut(&Rank::new(1)).expect("a state"));
        assert_eq!(still(&look), None);
    };
    change(&|state| state.waits.clear());
    change(&|state| state.waits = vec![Wait::Work(None)]);
    change(&|state| state.given_up = true);
    change(&|state| state.epoch = 1);
    change(&|state| {
        state.waits = vec![Wait::Members(MemberWait { is_of_issuer: false, ..wait(1, &[2]) })]
    });
    // Its message is under way.
    change(&|state| state.issued.note(&operation(0, 0)));
    let mut look = ring();
    look.remove(&Rank::new(1));
    assert_eq!(still(&look), None, "nothing is known of it");
}

#[test]
fn a_rank_that_left_short_of_an_operation_is_named_after_two_looks() {
    let left = |issued: &[u64]| {
        let mut state = RankState { has_left: true, ..RankState::default() };
        issued.iter().for_each(|group| state.issued.note(&operation(*group, 0)));
        state
    };
    let of = |left: RankState| look([waiting(wait(3, &[1])), left]);
    let finding = Some(JudgeFinding::Left(Rank::new(1), operation(3, 0)));
    assert_eq!(still(&of(left(&[2]))), finding);
    assert_eq!(judge(&of(left(&[2])), &Look::new()), None);
    assert_eq!(still(&of(left(&[2, 3]))), None, "its message is under way");
    let gave_up = RankState { given_up: true, ..left(&[2]) };
    assert_eq!(still(&of(gave_up)), None, "no rank is blamed for leaving then");
    assert_eq!(still(&of(RankState { epoch: 1, ..left(&[2]) })), None);
    let mut ring = ring();
    ring.get_mut(&Rank::new(1)).expect("a state").has_left = true;
    assert_eq!(still(&ring), Some(JudgeFinding::Left(Rank::new(1), operation(0, 0))));
}

fn rolled(hashes: &[(u64, u128)]) -> RankState {
    let count = hashes.last().map_or(0, |(index, _)| index + 1);
    let rolled = Rolled { count, hashes: hashes.iter().copied().collect(), ..Rolled::default() };
    RankState { rolled: [(GroupId::from_hash(9), rolled)].into(), ..RankState::default() }
}

#[test]
fn other_hashes_at_one_call_are_a_difference_at_the_first_of_them() {
    let group = GroupId::from_hash(9);
    let of = |states: &[&[(u64, u128)]]| difference(&look(states.iter().map(|it| rolled(it))));
    assert_eq!(of(&[&[(4, 1)], &[(4, 1)], &[(5, 2)]]), None);
    assert_eq!(of(&[&[(4, 1)], &[(3, 1), (4, 2)]]), Some((group, 4)));
    assert_eq!(of(&[&[(3, 1), (4, 2), (5, 3)], &[(3, 1), (4, 7), (5, 8)]]), Some((group, 4)));
    let two = look([rolled(&[(4, 1)]), rolled(&[(4, 2)])]);
    assert_eq!(
        judge(&two, &Look::new()),
        Some(JudgeFinding::Differ(group, 4)),
        "one look is enough"
    );
}

/// A device of rank 0 waits in a call of NCCL, and its thread goes on.
#[test]
fn a_wait_in_nccl_is_for_the_ranks_that_have_made_fewer_calls() {
    let on_device = |index| {
        let operation = operation(9, 0);
        let missing = ranks(&[1, 2]);
        Wait::Members(MemberWait { operation, index: Some(index), missing, is_of_issuer: false })
    };
    let mut first = rolled(&[(6, 1)]);
    first.waits.push(on_device(5));
    let states = look([first.clone(), rolled(&[(5, 1)]), rolled(&[(4, 1)])]);
    assert_eq!(culprit(&states, Rank::new(0), &first.waits[0]), Some(Rank::new(2)));
    assert_eq!(
        uneven(&states, awaited(&states)),
        Some(GroupId::from_hash(9)),
        "earlier hashes are to be compared"
    );
    let mut left = states.clone();
    left.get_mut(&Rank::new(2)).expect("a state").has_left = true;
    assert_eq!(still(&left), Some(JudgeFinding::Left(Rank::new(2), operation(9, 0))));
    let even = look([first.clone(), rolled(&[(6, 1)]), rolled(&[(6, 1)])]);
    assert_eq!(
        (culprit(&even, Rank::new(0), &first.waits[0]), uneven(&even, awaited(&even))),
        (None, None)
    );
}

#[test]
fn the_culprit_waits_for_no_other() {
    let named = |look: &Look| {
        let wait = look[&Rank::new(0)].waits[0].clone();
        culprit(look, Rank::new(0), &wait).map(Rank::index)
    };
    let chain = |last: RankState| look([waiting(wait(0, &[1])), waiting(wait(1, &[2])), last]);
    assert_eq!(named(&chain(RankState::default())), Some(2));
    assert_eq!(named(&chain(waiting(wait(2, &[1])))), Some(1), "the lowest that is missed");
    let reads = RankState { waits: vec![Wait::Work(Some(Rank::new(5)))], ..RankState::default() };
    assert_eq!(named(&chain(reads)), Some(5), "its gradient is being read");
    let works = RankState { waits: vec![Wait::Work(None)], ..RankState::default() };
    assert_eq!(named(&chain(works)), Some(1));
    let mut unknown = chain(RankState::default());
    unknown.remove(&Rank::new(2));
    assert_eq!(named(&unknown), Some(2), "it may be frozen");
    let mut issued = RankState::default();
    issued.issued.note(&operation(1, 0));
    assert_eq!(named(&chain(issued)), Some(1), "a message of rank 2 is under way to it");
}

#[test]
fn numbers_that_a_fault_left_out_are_not_issued() {
    let mut issued = Issued::default();
    let at = |epoch, sequence| Descriptor { sequence, ..(*operation(1, epoch)).clone() };
    issued.note(&at(2, 1));
    assert!(issued.has(&at(2, 1)) && !issued.has(&at(2, 0)) && !issued.has(&at(2, 2)));
    issued.note(&at(2, 0));
    assert!(issued.has(&at(2, 0)) && !issued.has(&at(3, 0)));
    assert!(issued.has(&at(1, 7)), "the epoch is over");
    issued.note(&at(3, 0));
    assert!(issued.has(&at(3, 0)) && !issued.has(&at(3, 1)));
}
