use std::sync::Arc;
use std::time::Instant;

use hsdp_sharding::{DType, Rank};

use super::operation::{Arrival, Arrived, Operation};
use super::status::Status;
use super::table::{Key, Table};
use crate::{Channel, Counts, Descriptor, Error, GroupId, Op, Tag};

fn ranks() -> Arc<[Rank]> {
    [0, 1, 2].map(Rank::new).into()
}

fn descriptor(epoch: u64, count: usize) -> Arc<Descriptor> {
    Arc::new(Descriptor {
        group: GroupId::of(&ranks(), Channel::User),
        channel: Channel::User,
        epoch,
        sequence: 0,
        op: Op::AllGather,
        reduction: None,
        dtype: Some(DType::F32),
        counts: Counts::Each(count),
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::default(),
    })
}

fn key(epoch: u64) -> Key {
    Key::from(&*descriptor(epoch, 1))
}

fn arrival(count: usize) -> Arrival {
    Arrival { descriptor: descriptor(0, count), deposit: Box::new(count) }
}

fn aborted(step: u64) -> Error {
    Error::StepAborted { rank: Rank::new(0), step, reason: "a test".into() }
}

#[test]
fn the_last_member_gets_all_deposits_in_slot_order() {
    let operation = Operation::new(key(0), ranks());
    assert!(matches!(operation.arrive(2, arrival(5)), Arrived::Waiting));
    let there = operation.attendance().expect("members are missing");
    assert_eq!(there.arrived, [Rank::new(2)]);
    assert_eq!(there.missing, [0, 1].map(Rank::new));
    assert!(matches!(operation.arrive(0, arrival(5)), Arrived::Waiting));
    let Arrived::Last(arrivals) = operation.arrive(1, arrival(5)) else { panic!("all are there") };
    assert_eq!(arrivals.len(), 3);
    assert!(operation.attendance().is_none());
    assert!(!operation.is_settled());
}

#[test]
fn an_operation_that_is_worked_on_does_not_fail_with_its_epoch() {
    let operation = Operation::new(key(0), ranks());
    for slot in 0..3 {
        drop(operation.arrive(slot, arrival(5)));
    }
    operation.fail_gathering(&aborted(1));
    assert!(!operation.is_settled());
    operation.succeed(vec![Box::new(1), Box::new(2), Box::new(3)]);
    // What comes too late changes nothing.
    operation.fail(&aborted(1));
    let output = operation.take(1).expect("it is done");
    assert_eq!(output.downcast_ref(), Some(&2));
}

#[test]
fn whoever_comes_to_a_failed_operation_is_refused() {
    let operation = Operation::new(key(0), ranks());
    assert!(matches!(operation.arrive(0, arrival(5)), Arrived::Waiting));
    operation.fail_gathering(&aborted(1));
    assert!(
        matches!(operation.arrive(1, arrival(5)), Arrived::Refused(error) if error == aborted(1))
    );
    assert_eq!(operation.take(0).map(drop), Err(aborted(1)));
    // Nobody sleeps on what is settled.
    operation.park_until(Instant::now() + std::time::Duration::from_secs(60));
}

#[test]
fn members_that_disagree_are_told_at_once() {
    let operation = Operation::new(key(0), ranks());
    assert!(matches!(operation.arrive(0, arrival(5)), Arrived::Waiting));
    let Arrived::Disagrees(wanted) = operation.arrive(2, arrival(6)) else { panic!("5 is not 6") };
    let counts: Vec<_> = wanted.iter().map(|it| it.as_ref().map(|it| it.counts.total())).collect();
    assert_eq!(counts, [Some(5), None, Some(6)]);
}

#[test]
fn the_table_admits_only_who_makes_an_operation() {
    let table = Table::default();
    let make = || Operation::new(key(0), ranks());
    let made = table.enter(key(0), || Ok(()), make).expect("admitted");
    // Whoever finds it is not asked: an early end takes it out, or fails it.
    let found = table.enter(key(0), || Err(aborted(1)), make).expect("found");
    assert!(Arc::ptr_eq(&made, &found));
    assert_eq!(
        table.enter(key(1), || Err(aborted(1)), make).map(drop).expect_err("refused"),
        aborted(1)
    );
    assert_eq!(table.drain(Some(1)).len(), 0);
    assert_eq!(table.snapshot().len(), 1);
    assert_eq!(table.drain(Some(0)).len(), 1);
    assert_eq!(table.drain(None).len(), 0);
}

#[test]
fn the_first_end_wins_and_old_ones_are_forgotten() {
    let status = Status::default();
    assert_eq!(status.check(0), Ok(()));
    assert_eq!(status.end_epoch(0, aborted(1)), aborted(1));
    assert_eq!(status.end_epoch(0, aborted(2)), aborted(1));
    assert_eq!((status.check(0), status.check(1)), (Err(aborted(1)), Ok(())));
    assert!(status.is_aborted(0) && !status.is_aborted(1));
    status.end_epoch(1, aborted(3));
    status.forget_before(1);
    assert_eq!((status.check(0), status.check(1)), (Err(aborted(1)), Err(aborted(3))));
    // An epoch that is long over never comes back, for a thread that slept through it.
    status.forget_before(2);
    assert_eq!((status.check(0), status.check(2)), (Err(aborted(3)), Ok(())));
    assert_eq!(status.end_world(aborted(4)), aborted(4));
    assert_eq!(status.end_world(aborted(5)), aborted(4));
    assert_eq!((status.check(1), status.world_end()), (Err(aborted(4)), Some(aborted(4))));
}
