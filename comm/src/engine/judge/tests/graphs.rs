//! Graphs of waits, against a search for an order in which all of them end.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const RANKS: usize = 5;

/// A wait: the operation, the ranks that are missing, and whether the only issuing thread waits.
type Drawn = (u64, Vec<usize>, bool);

/// A rank: its waits, the operations that it has issued beside those, its epoch, and whether it has
/// left or gives its epoch up.
fn rank() -> impl Strategy<Value = RankState> {
    let wait = (0..4_u64, vec(0..RANKS, 0..3), prop::bool::weighted(0.8));
    let odd = prop::bool::weighted(0.1);
    (vec(wait, 0..3), vec(0..4_u64, 0..2), odd, odd, odd).prop_map(
        |(waits, issued, is_ahead, has_left, given_up)| {
            let epoch = u64::from(is_ahead);
            let mut state = RankState { epoch, has_left, given_up, ..RankState::default() };
            issued.iter().for_each(|group| state.issued.note(&operation(*group, epoch)));
            // One thread issues, and waits in one operation.
            let mut has_issuer = false;
            for (group, missing, is_of_issuer) in waits {
                state.waits.push(drawn((group, missing, is_of_issuer && !has_issuer), epoch));
                has_issuer |= is_of_issuer;
            }
            state
        },
    )
}

fn drawn((group, missing, is_of_issuer): Drawn, epoch: u64) -> Wait {
    let operation = operation(group, epoch);
    let missing = ranks(&missing);
    Wait::Members(MemberWait { operation, index: None, missing, is_of_issuer })
}

/// The waits that only other ranks end.
fn waits(look: &Look) -> Vec<(Rank, &MemberWait)> {
    let mut waits = Vec::new();
    for (rank, state) in look.iter().filter(|(_, it)| !it.has_left && !it.given_up) {
        waits.extend(state.members().map(|wait| (*rank, wait)));
    }
    waits
}

/// Whether the waits can end in this order: each when the ranks that it misses have issued its
/// operation, or can issue it.
fn end_in(look: &Look, order: &[(Rank, &MemberWait)]) -> bool {
    (0..order.len()).all(|at| {
        let (rank, wait) = order[at];
        wait.missing.iter().all(|other| {
            let state = &look[other];
            let is_stuck = |(stuck, it): &(Rank, &MemberWait)| stuck == other && it.is_of_issuer;
            let is_free = state.epoch != look[&rank].epoch || !order[at..].iter().any(is_stuck);
            is_free || (*other != rank && state.issued.has(&wait.operation))
        })
    })
}

/// Whether the waits can end in any order that begins with the first `fixed` of them.
fn end_in_any(look: &Look, order: &mut Vec<(Rank, &MemberWait)>, fixed: usize) -> bool {
    if fixed == order.len() {
        return end_in(look, order);
    }
    (fixed..order.len()).any(|next| {
        order.swap(fixed, next);
        let ends = end_in_any(look, order, fixed + 1);
        order.swap(fixed, next);
        ends
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn there_is_a_circle_if_and_only_if_no_order_of_completions_exists(
        states in vec(rank(), RANKS),
    ) {
        let look = look(states);
        let mut order = waits(&look);
        prop_assume!(order.len() < 8);
        let ends = end_in_any(&look, &mut order, 0);
        prop_assert_eq!(circle(&look, &look).is_empty(), ends);
    }

    #[test]
    fn a_circle_has_only_waits_that_are_in_both_looks(
        states in vec(rank(), RANKS),
        moved in vec(prop::option::of(rank()), RANKS),
    ) {
        let look = look(states);
        let mut before = look.clone();
        before.extend((0..).map(Rank::new).zip(moved).filter_map(|(rank, it)| Some((rank, it?))));
        for row in circle(&look, &before) {
            let Wanted::Waiting { operation, .. } = row.wanted else { unreachable!("a wait") };
            let waits = before[&row.rank].members().any(|it| it.operation == operation);
            prop_assert!(waits && before[&row.rank].epoch == look[&row.rank].epoch);
        }
    }
}
