//! Where operations lie while they gather, and whose memory serves the next.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use hsdp_sharding::Rank;

use super::{Listing, aborted, arrive, company, complete, taken};
use crate::Error;
use crate::local::identity::{Company, Number};
use crate::local::operation::{Arrived, Operation};
use crate::local::post::Post;
use crate::local::table::Table;

fn post(most: usize) -> Post {
    Post::new(company(), most)
}

fn number(epoch: u64, sequence: u64) -> Number {
    Number { epoch, sequence }
}

fn enter(post: &Post, number: Number) -> Arc<Operation> {
    post.enter::<usize, Listing>(number, || Ok(())).expect("admitted")
}

/// All come and take what they get.
fn run(post: &Post, operation: &Operation) {
    gather(post, operation);
    assert!((0..3).all(|slot| taken(operation, slot).is_ok()));
}

/// All come.
fn gather(post: &Post, operation: &Operation) {
    for slot in 0..3 {
        if let last @ Arrived::Last(_) = arrive(operation, slot, 5) {
            post.remove(operation.number());
            complete(operation, last);
        }
    }
}

/// How many operations serve many that come one after the other, from number 1 of an epoch.
fn serving_one_by_one(post: &Post, epoch: u64) -> usize {
    let one = |sequence| {
        let operation = enter(post, number(epoch, sequence));
        run(post, &operation);
        Arc::as_ptr(&operation)
    };
    (1..200).map(one).collect::<BTreeSet<_>>().len()
}

#[test]
fn only_who_makes_an_operation_is_asked_whether_it_may() {
    let post = post(4);
    let enter = |number, admitted| post.enter::<usize, Listing>(number, || admitted);
    let made = enter(number(0, 0), Ok(())).expect("admitted");
    // Whoever finds it is not asked: an early end takes it out, or fails it.
    let found = enter(number(0, 0), Err(aborted(1))).expect("found");
    assert!(Arc::ptr_eq(&made, &found));
    let refused: Result<_, Error> = enter(number(1, 0), Err(aborted(1)));
    assert_eq!(refused.map(drop).expect_err("refused"), aborted(1));
    assert_eq!(post.drain(Some(1)).len(), 0);
    assert_eq!(post.snapshot().len(), 1);
    assert_eq!(post.drain(Some(0)).len(), 1);
    assert_eq!(post.drain(None).len(), 0);
}

#[test]
fn an_operation_takes_the_memory_of_one_that_is_over_and_that_nobody_holds() {
    let post = post(2);
    let [held, free] = [0, 1].map(|sequence| enter(&post, number(0, sequence)));
    [&held, &free].into_iter().for_each(|operation| run(&post, operation));
    let addresses = [Arc::as_ptr(&held), Arc::as_ptr(&free)];
    drop(free);
    assert_eq!(Arc::as_ptr(&enter(&post, number(0, 3))), addresses[1]);
    let other = enter(&post, number(0, 2));
    assert!(!addresses.contains(&Arc::as_ptr(&other)), "one is held, and one is in use");
}

#[test]
fn an_operation_of_which_an_output_was_not_taken_serves_no_other() {
    let post = post(2);
    let operation = enter(&post, number(0, 0));
    gather(&post, &operation);
    assert!((0..2).all(|slot| taken(&operation, slot).is_ok()));
    let former = Arc::downgrade(&operation);
    post.forsake(&operation);
    drop(operation);
    assert_eq!(Weak::strong_count(&former), 0, "it is freed at once");
}

#[test]
fn who_is_still_to_come_finds_an_operation_that_another_has_forsaken() {
    for most in [0, 2] {
        let post = post(most);
        let operation = enter(&post, number(0, 0));
        post.forsake(&operation);
        assert!(Arc::ptr_eq(&enter(&post, number(0, 0)), &operation));
        // A later one of the same place does not hide it.
        let later = enter(&post, number(0, 2));
        assert!(Arc::ptr_eq(&enter(&post, number(0, 0)), &operation));
        [&operation, &later].into_iter().for_each(|operation| run(&post, operation));
        let former = Arc::downgrade(&operation);
        drop(operation);
        assert_eq!(Weak::strong_count(&former), 0);
    }
}

#[test]
fn operations_are_found_however_many_gather_at_once() {
    for most in [0, 1, 2, 8, 1024] {
        let post = post(most);
        let numbers: Vec<_> =
            (0..2).flat_map(|epoch| (0..20).map(move |sequence| number(epoch, sequence))).collect();
        let made: Vec<_> = numbers.iter().map(|number| enter(&post, *number)).collect();
        let is_found = |(number, made): (&Number, &Arc<Operation>)| {
            made.number() == *number && Arc::ptr_eq(&enter(&post, *number), made)
        };
        assert!(numbers.iter().zip(&made).all(is_found), "{most} places");
        assert_eq!(post.snapshot().len(), made.len());
        made[7..12].iter().for_each(|operation| run(&post, operation));
        assert_eq!(post.snapshot().len(), made.len() - 5);
        assert_eq!(post.drain(Some(1)).len(), 20);
        assert_eq!(post.drain(None).len(), 15);
    }
}

#[test]
fn one_that_is_held_for_long_needs_one_place_and_not_as_many_as_others_pass_by() {
    let post = post(1024);
    let held = enter(&post, number(0, 0));
    run(&post, &held);
    let serving = serving_one_by_one(&post, 0);
    assert!(serving <= 3, "{serving} operations for two at once");
    let former = Arc::downgrade(&held);
    post.forsake(&held);
    drop(held);
    assert_eq!(Weak::strong_count(&former), 0, "it is found wherever it has gone");
}

#[test]
fn an_operation_of_an_epoch_before_takes_one_place() {
    let post = post(1024);
    let held: Vec<_> = (0..20).map(|epoch| enter(&post, number(epoch, 0))).collect();
    for operation in &held {
        gather(&post, operation);
    }
    let later = enter(&post, number(20, 0));
    run(&post, &later);
    drop(later);
    let serving = serving_one_by_one(&post, 20);
    assert!(serving <= 64, "{serving} operations for one at once");
}

#[test]
fn no_memory_is_taken_once_as_many_operations_have_places_as_are_under_way() {
    let post = post(64);
    let mut addresses = BTreeSet::new();
    for round in 0..10 {
        let numbers = (0..13).map(|sequence| number(0, round * 13 + sequence));
        let made: Vec<_> = numbers.map(|number| enter(&post, number)).collect();
        if round >= 3 {
            addresses.extend(made.iter().map(Arc::as_ptr));
        }
        made.iter().for_each(|operation| run(&post, operation));
    }
    assert!(addresses.len() <= 16, "{} operations for 13 at once", addresses.len());
}

#[test]
fn an_operation_that_gathers_again_is_found_again() {
    for most in [0, 2] {
        let post = post(most);
        let operation = enter(&post, number(0, 0));
        post.remove(operation.number());
        assert_eq!(post.snapshot().len(), 0);
        post.readmit(&operation, || Ok(())).expect("admitted");
        assert!(Arc::ptr_eq(&enter(&post, number(0, 0)), &operation));
        assert_eq!(Arc::strong_count(&operation), 2, "it is there once");
        post.remove(operation.number());
        assert_eq!(post.readmit(&operation, || Err(aborted(1))), Err(aborted(1)));
        assert_eq!(post.snapshot().len(), 0);
    }
}

#[test]
fn a_table_gives_operations_in_the_order_of_their_keys() {
    // The first of them may be named in an error, so it is not left to chance.
    let table = Table::default();
    let groups = [Rank::new(7), Rank::new(3)].map(|rank| {
        let group = crate::GroupId::of(&[rank], crate::Channel::User);
        table.post(Company { group, ..company() })
    });
    let made = groups.iter().flat_map(|post| {
        (0..10).rev().map(|epoch| enter(post, number(epoch, 0))).collect::<Vec<_>>()
    });
    let mut made: Vec<_> = made.collect();
    made.sort_by_key(|operation| operation.key());
    let are_made = |listed: Vec<Arc<Operation>>| {
        listed.len() == 20 && listed.iter().zip(&made).all(|(it, other)| Arc::ptr_eq(it, other))
    };
    assert!(are_made(table.snapshot()));
    assert!(are_made(table.drain(None)));
    let (first, others) = made.split_first().expect("there are some");
    let again = groups.iter().find(|post| Arc::ptr_eq(&enter(post, first.number()), first));
    assert!(again.is_none() && others.iter().all(|it| !it.is_settled()), "they were taken out");
}
