//! Ranks that are stuck and ranks that are not, one condition at a time.

use std::thread;

use super::*;
use crate::WorldError::Mismatch;

/// A world of three ranks, all of whose calls came from this thread: 0 waits for 1, 1 for 2 and 2
/// for 0.
fn circle() -> (Arc<Core>, [Arc<SharedOperation>; 3]) {
    let core = core();
    core.state.records.iter().for_each(|record| record.enter(&descriptor(0, 5)));
    (core, [&[0, 2], &[0, 1], &[1, 2]].map(|arrived: &[usize; 2]| gathering(arrived)))
}

/// The error with which the world ended after rank 0 looked for a circle.
fn looked(core: &Core) -> Option<Error> {
    core.end_if_circle(Rank::new(0));
    core.state.early_ends.world_end()
}

#[test]
fn a_rank_that_has_another_thread_wait_is_not_stuck() {
    let (core, operations) = circle();
    let waits = |rank| core.state.record(Rank::new(rank)).block_on(&operations[rank]);
    let _others = [waits(0), waits(1)];
    thread::scope(|scope| {
        let waits = || {
            let _waits = waits(2);
            looked(&core)
        };
        assert_eq!(scope.spawn(waits).join().expect("no panic"), None);
    });
}

#[test]
fn a_rank_that_has_left_is_not_stuck() {
    let (core, operations) = circle();
    let waits = |rank| core.state.record(Rank::new(rank)).block_on(&operations[rank]);
    let _circle = [waits(0), waits(1), waits(2)];
    // Its leaving is what ends the world, with another error.
    assert!(core.state.record(Rank::new(1)).leave());
    assert_eq!(looked(&core), None);
}

#[test]
fn work_that_runs_and_members_that_disagree_end_by_themselves() {
    for count in [5, 6] {
        let (core, operations) = circle();
        let waits = |rank| core.state.record(Rank::new(rank)).block_on(&operations[rank]);
        let _circle = [waits(0), waits(1), waits(2)];
        // Rank 0 comes to what rank 2 waits for: all are there, or it wants something else.
        assert!(!matches!(arrive(&operations[2], 0, count), Arrived::Waiting));
        assert_eq!(looked(&core), None);
    }
}

#[test]
fn a_rank_that_waits_for_a_circle_looks_too_whatever_its_other_threads_do() {
    let (core, operations) = circle();
    let waits = |rank| core.state.record(Rank::new(rank)).block_on(&operations[rank]);
    // 1 and 2 wait for each other, in another operation; 0 is in neither, and has two threads.
    let pair = gathering(&[0, 2]);
    let _circle = [core.state.record(Rank::new(2)).block_on(&pair), waits(1), waits(0)];
    let issue = || core.state.record(Rank::new(0)).enter(&descriptor(0, 5));
    thread::scope(|scope| scope.spawn(issue).join().expect("no panic"));
    let Some(Error::World(Mismatch(table))) = looked(&core) else { panic!("they are stuck") };
    assert_eq!(table.rows.len(), 3);
}
