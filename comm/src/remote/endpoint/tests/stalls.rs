//! Ranks that cannot go on, and devices that wait in calls of NCCL.

use super::*;
use crate::WorldError::{Aborted, Mismatch};
use crate::engine::judge::{MemberWait, WaitKey};
use crate::operations::note_operation;
use crate::remote::Urgency;
use crate::{Between, RankFailure, Wanted, launch};

/// Of a group of three ranks, on which calls go by NCCL.
fn call(sequence: u64, count: usize) -> Arc<Descriptor> {
    let ranks = [0, 1, 2].map(Rank::new);
    Arc::new(Descriptor {
        group: GroupId::of(&ranks, Channel::Reduce),
        channel: Channel::Reduce,
        epoch: 0,
        sequence,
        op: Op::AllReduce,
        reduction: None,
        dtype: None,
        counts: Counts::Each(count),
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::default(),
    })
}

/// A device waits in the call of this index, and does not know for which of the others.
fn wait_in(index: u64, rank: Rank) -> MemberWait {
    let missing = [0, 1, 2].map(Rank::new).into_iter().filter(|it| *it != rank).collect();
    MemberWait { operation: call(index, 8), index: Some(index), missing, is_of_issuer: false }
}

fn apart(deadline: Duration) -> WorldOptions {
    let circle_grace = Duration::from_millis(20);
    WorldOptions { between: Between::Messages, deadline, circle_grace, ..WorldOptions::default() }
}

const LONG: Duration = Duration::from_secs(60);

/// Returns the ends of three ranks that have made these calls of NCCL. Those that `wait` wait for
/// the others in a barrier.
fn ends(calls: [&[usize]; 3], waits: impl Fn(Rank) -> bool + Sync) -> Vec<Error> {
    let ends = launch(3, apart(LONG), |world| {
        let rank = world.rank();
        let handle = world.handle();
        let calls = calls[rank.index()];
        for (sequence, count) in (0..).zip(calls) {
            note_operation(&world, &call(sequence, *count));
        }
        let last = calls.len() as u64 - 1;
        handle.own.record.wait_on_device(Some(wait_in(last, rank)));
        if waits(rank) {
            let barrier = world.world_group(Channel::User).barrier(Tag::default());
            return Ok(barrier.and_then(Pending::wait).expect_err("it is never complete"));
        }
        Ok::<_, RankFailure>(handle.own.early_ends().sleep(LONG, || false).expect("the world ends"))
    });
    ends.into_iter().map(|end| end.expect("no panic")).collect()
}

/// The number of elements of each rank's call, of a table that all ranks have.
fn counts(ends: &[Error]) -> Vec<Counts> {
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    let Error::World(Mismatch(table)) = &ends[0] else { panic!("{}", ends[0]) };
    let count = |wanted: &Wanted| match wanted {
        Wanted::Arrived(descriptor) => descriptor.counts.clone(),
        other => panic!("{other:?}"),
    };
    table.rows.iter().map(|row| count(&row.wanted)).collect()
}

#[test]
fn other_calls_of_nccl_end_the_world_with_the_table_of_the_first() {
    let ends = ends([&[1, 2, 3, 4], &[1, 2, 3, 4], &[1, 7, 3, 4]], |rank| rank.index() != 2);
    assert_eq!(counts(&ends), [2, 2, 7].map(Counts::Each));
    let place = "ranks disagree about operation 1 on channel reduce, epoch 0";
    assert!(ends[0].to_string().contains(place), "{}", ends[0]);
}

#[test]
fn calls_are_compared_where_a_rank_has_made_fewer() {
    let ends = ends([&[1, 2, 3, 4], &[1, 2, 9, 4, 5], &[1, 2, 3]], |rank| rank.index() == 1);
    assert_eq!(counts(&ends), [3, 9, 3].map(Counts::Each));
}

#[test]
fn the_deadline_of_a_device_names_the_rank_that_has_made_fewer_calls() {
    let both = std::sync::Barrier::new(2);
    let ends = launch(3, apart(Duration::from_secs(7)), |world| {
        let rank = world.rank();
        let handle = world.handle();
        let calls = if rank.index() == 2 { 1 } else { 2 };
        (0..calls).for_each(|sequence| note_operation(&world, &call(sequence, 8)));
        if rank.index() == 2 {
            return Ok(handle.own.early_ends().sleep(LONG, || false).expect("the world ends"));
        }
        let wait = wait_in(1, rank);
        handle.own.record.wait_on_device(Some(wait.clone()));
        let endpoint = handle.endpoint().expect("one");
        endpoint.report(Urgency::Late, wait.key());
        let until = from_now(LONG);
        while endpoint.culprit(wait.key()).is_none() && Instant::now() < until {
            endpoint.sleep(FIRST_NAP);
        }
        let culprit = endpoint.culprit(wait.key());
        // Where the world has ended, a rank gets no verdict any more.
        both.wait();
        assert!(culprit.is_some(), "for a warning");
        handle.own.core.end_late_on_device(rank, &wait);
        Ok::<_, RankFailure>(world.end().expect("the world has ended"))
    });
    for end in ends {
        let end = end.expect("no panic");
        let Error::World(Aborted { rank, ref reason, .. }) = end else { panic!("{end}") };
        assert_eq!(rank, Rank::new(2), "{end}");
        let AbortReason::Deadline { awaited, missing, .. } = reason else { panic!("{end}") };
        assert_eq!((awaited, &missing[..]), (&call(1, 8), &[Rank::new(2)][..]));
    }
}

#[test]
fn a_comparer_that_is_silent_is_the_culprit() {
    let (core, endpoint) = opened_by(1, Silent::default());
    let key = WaitKey::new(&call(0, 8), None);
    let started = Instant::now();
    assert_eq!(endpoint.await_culprit(key), Err(Rank::new(0)));
    assert!(started.elapsed() >= Duration::from_secs(1));
    core.end_late_on_device(Rank::new(1), &wait_in(0, Rank::new(1)));
    let Some(Error::World(Aborted { rank, reason, .. })) = core.state.early_ends.world_end() else {
        panic!("it ends")
    };
    assert_eq!(rank, Rank::new(0));
    assert!(matches!(reason, AbortReason::Unreachable { .. }), "{reason}");
}

#[test]
fn a_stalled_rank_reports_after_times_that_grow() {
    let (_core, endpoint) = opened_by(1, Silent::default());
    let key = WaitKey::new(&call(0, 8), None);
    assert_eq!(messages(&endpoint), [MessageKind::Hello]);
    (0..9).for_each(|_| endpoint.report(Urgency::Stalled, key));
    assert_eq!(messages(&endpoint), [MessageKind::Compare]);
    endpoint.report(Urgency::Deadline, key);
    assert_eq!(messages(&endpoint), [MessageKind::Compare], "at once");
    endpoint.forget_reports(key);
    endpoint.report(Urgency::Stalled, key);
    assert_eq!(messages(&endpoint), [MessageKind::Compare], "it is another wait");
}
