//! Ranks that run programs in a simulated order, while others look at them: a circle is found if
//! and only if they never end.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const RANKS: usize = 4;

/// The next thing that a rank does: it issues an operation of a group, or waits for its oldest one.
#[derive(Clone, Copy, Debug)]
enum Step {
    Issue(usize),
    Wait,
}

/// The groups of which operations are made.
const GROUPS: [&[usize]; 4] = [&[0, 1, 2, 3], &[0, 1], &[1, 2, 3], &[3, 0]];

/// A rank: its program, and how far it is.
#[derive(Clone, Debug)]
struct Running {
    program: Vec<Step>,
    at: usize,
    issued: [u64; GROUPS.len()],
    pending: Vec<Arc<Descriptor>>,
}

fn rank() -> impl Strategy<Value = Running> {
    let step = prop_oneof![(0..GROUPS.len()).prop_map(Step::Issue), Just(Step::Wait)];
    vec(step, 0..8).prop_map(|program| Running {
        program,
        at: 0,
        issued: [0; GROUPS.len()],
        pending: Vec::new(),
    })
}

/// Every rank issues the operations of all programs in its own order, so that some runs end and
/// some do not.
fn ranks_of(programs: Vec<Running>) -> Vec<Running> {
    let count = |group| {
        let is_it = |step: &&Step| matches!(step, Step::Issue(it) if *it == group);
        programs.iter().map(|rank| rank.program.iter().filter(is_it).count()).max().unwrap_or(0)
    };
    let counts: Vec<usize> = (0..GROUPS.len()).map(count).collect();
    let complete = |(rank, mut it): (usize, Running)| {
        it.program
            .retain(|step| !matches!(step, Step::Issue(group) if !GROUPS[*group].contains(&rank)));
        for group in (0..GROUPS.len()).filter(|group| GROUPS[*group].contains(&rank)) {
            let is_it = |step: &&Step| matches!(step, Step::Issue(it) if *it == group);
            let more = counts[group] - it.program.iter().filter(is_it).count();
            it.program.extend(std::iter::repeat_n(Step::Issue(group), more));
        }
        let waits = it.program.len();
        it.program.extend(std::iter::repeat_n(Step::Wait, waits));
        it
    };
    programs.into_iter().enumerate().map(complete).collect()
}

fn missing(all: &[Running], operation: &Descriptor) -> Vec<Rank> {
    let group = group_of(operation);
    let is_missing = |rank: &usize| all[*rank].issued[group] <= operation.sequence;
    GROUPS[group].iter().copied().filter(is_missing).map(Rank::new).collect()
}

fn group_of(operation: &Descriptor) -> usize {
    usize::try_from(operation.group.get()).expect("the number of a group")
}

/// The state of a rank. Some messages that others have sent are still under way to it.
fn state(all: &[Running], rank: usize, delayed: bool) -> RankState {
    let mut state = RankState::default();
    for (group, count) in all[rank].issued.iter().enumerate() {
        let note = |sequence| Descriptor { sequence, ..(*operation(group as u64, 0)).clone() };
        (0..*count).for_each(|sequence| state.issued.note(&note(sequence)));
    }
    if let Some(operation) = awaited(&all[rank]) {
        let mut missing = missing(all, operation);
        if delayed {
            missing = ranks(GROUPS[group_of(operation)]);
            missing.retain(|other| other.index() != rank);
        }
        let operation = Arc::clone(operation);
        let members = MemberWait { operation, index: None, missing, is_of_issuer: true };
        state.waits.push(Wait::Members(members));
    }
    state
}

fn awaited(rank: &Running) -> Option<&Arc<Descriptor>> {
    let waits = matches!(rank.program.get(rank.at), Some(Step::Wait));
    rank.pending.first().filter(|_| waits)
}

/// One step of a rank, if it can make one.
fn advance(all: &mut [Running], rank: usize) -> bool {
    let Some(step) = all[rank].program.get(all[rank].at).copied() else { return false };
    match step {
        Step::Issue(group) => {
            let sequence = all[rank].issued[group];
            let issued = Descriptor { sequence, ..(*operation(group as u64, 0)).clone() };
            all[rank].pending.push(Arc::new(issued));
            all[rank].issued[group] += 1;
        }
        Step::Wait => match awaited(&all[rank]).cloned() {
            Some(operation) if !missing(all, &operation).is_empty() => return false,
            Some(_) => drop(all[rank].pending.remove(0)),
            None => {}
        },
    }
    all[rank].at += 1;
    true
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_circle_is_found_if_and_only_if_ranks_never_end(
        programs in vec(rank(), RANKS),
        schedule in vec((0..RANKS, any::<bool>(), any::<bool>()), 0..200),
    ) {
        let mut all = ranks_of(programs);
        // States of a look are taken at any moments; a look begins when the one before it is
        // complete.
        let mut before = Look::new();
let mut current = Look::new();
let mut found = false;
        for (rank, looks, delayed) in schedule {
            if looks {
                current.insert(Rank::new(rank), state(&all, rank, delayed));
            } else {
                advance(&mut all, rank);
            }
            if current.len() == RANKS {
                found |= !circle(&current, &before).is_empty();
                before = std::mem::take(&mut current);
            }
        }
        while (0..RANKS).any(|rank| advance(&mut all, rank)) {}
        let end: Look = look((0..RANKS).map(|rank| state(&all, rank, false)));
        let is_over = all.iter().all(|rank| rank.at == rank.program.len());
        prop_assert!(!(found && is_over), "a circle was found in a run that ends");
        prop_assert_eq!(circle(&end, &end).is_empty(), is_over);
    }
}
