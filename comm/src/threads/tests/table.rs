//! Operations lie in the table while members are missing, and no longer.

use std::sync::{Arc, Weak};

use hsdp_sharding::Rank;

use super::{aborted, arrive, complete, ranks, taken};
use crate::engine::{Arrived, Gatherings, Key, SharedOperation};
use crate::{Channel, Error, GroupId};
use hsdp_flight::Origin;

fn key(epoch: u64, sequence: u64) -> Key {
    Key { group: GroupId::of(&ranks(), Channel::User), epoch, sequence }
}

fn make(key: Key) -> Result<Arc<SharedOperation>, Error> {
    Ok(Arc::new(SharedOperation::new(key, &ranks(), Origin::now())))
}

fn enter(table: &Gatherings, key: Key) -> Arc<SharedOperation> {
    table.enter(key, || make(key)).expect("admitted")
}

/// All arrive and take their outputs.
fn run(table: &Gatherings, operation: &SharedOperation) {
    for slot in 0..3 {
        if let last @ Arrived::Last(..) = arrive(operation, slot, 5) {
            table.remove(operation.key);
            complete(operation, last);
        }
    }
    assert!((0..3).all(|slot| taken(operation, slot).is_ok()));
}

#[test]
fn only_a_member_that_makes_an_operation_is_asked_whether_it_may() {
    let table = Gatherings::default();
    let made = enter(&table, key(0, 0));
    // A member that finds it is not asked: an early end takes it out, or fails it.
    let found = table.enter(key(0, 0), || Err(aborted(1))).expect("found");
    assert!(Arc::ptr_eq(&made, &found));
    let refused = table.enter(key(1, 0), || Err(aborted(1)));
    assert_eq!(refused.map(drop).expect_err("refused"), aborted(1));
    assert_eq!(table.take_out(Some(1)).len(), 0);
    assert_eq!(table.snapshot().len(), 1);
    assert_eq!(table.take_out(Some(0)).len(), 1);
    assert_eq!(table.take_out(None).len(), 0);
}

#[test]
fn an_operation_is_freed_when_its_members_let_go_of_it() {
    let table = Gatherings::default();
    let operation = enter(&table, key(0, 0));
    let former = Arc::downgrade(&operation);
    drop(operation);
    assert_eq!(Weak::strong_count(&former), 1, "members that are still to arrive find it");
    run(&table, &enter(&table, key(0, 0)));
    assert_eq!(Weak::strong_count(&former), 0);
}

#[test]
fn operations_are_found_however_many_gather_at_once() {
    let table = Gatherings::default();
    let keys = (0..2).flat_map(|epoch| (0..20).map(move |sequence| key(epoch, sequence)));
    let made: Vec<_> = keys.map(|key| enter(&table, key)).collect();
    assert!(made.iter().all(|made| Arc::ptr_eq(&enter(&table, made.key), made)));
    assert_eq!(table.snapshot().len(), made.len());
    made[7..12].iter().for_each(|operation| run(&table, operation));
    assert_eq!(table.snapshot().len(), made.len() - 5);
    assert_eq!(table.take_out(Some(1)).len(), 20);
    assert_eq!(table.take_out(None).len(), 15);
}

#[test]
fn an_operation_that_gathers_again_is_found_again() {
    let table = Gatherings::default();
    let operation = enter(&table, key(0, 0));
    table.remove(operation.key);
    assert_eq!(table.snapshot().len(), 0);
    table.enter(operation.key, || Ok(Arc::clone(&operation))).expect("admitted");
    assert!(Arc::ptr_eq(&enter(&table, key(0, 0)), &operation));
    assert_eq!(Arc::strong_count(&operation), 2, "it is there once");
    table.remove(operation.key);
    assert!(table.enter(operation.key, || Err(aborted(1))).is_err());
    assert_eq!(table.snapshot().len(), 0);
}

#[test]
fn a_table_gives_operations_in_the_order_of_their_keys() {
    // The first of them may be named in an error, so it is not left to chance.
    let table = Gatherings::default();
    let groups = [7, 3].map(|rank| GroupId::of(&[Rank::new(rank)], Channel::User));
    let keys = groups
        .into_iter()
        .flat_map(|group| (0..10).rev().map(move |epoch| Key { group, epoch, sequence: 0 }));
    let mut made: Vec<_> = keys.map(|key| enter(&table, key)).collect();
    made.sort_by_key(|operation| operation.key);
    let are_made = |listed: Vec<Arc<SharedOperation>>| {
        listed.len() == 20 && listed.iter().zip(&made).all(|(it, other)| Arc::ptr_eq(it, other))
    };
    assert!(are_made(table.snapshot()));
    assert!(are_made(table.take_out(None)));
    let (first, others) = made.split_first().expect("there are some");
    let again = enter(&table, first.key);
    let are_out = !Arc::ptr_eq(&again, first) && others.iter().all(|it| !it.is_settled());
    assert!(are_out, "they were taken out");
}
