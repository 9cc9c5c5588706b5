//! Code of users that calls back: into collectives, or into the end of its world.

use std::sync::{Arc, Mutex};

use hsdp_comm::CallError::Reentrant;
use hsdp_comm::{Channel, Error, Op, Pending, World, WorldOptions};

use super::{LARGE, Reading, layout, reduce, tag};
use crate::common::results;

#[test]
fn a_collective_from_inside_the_work_of_another_is_refused() {
    // A group of one does its work in the call.
    for size in [1, 2] {
        let refused = Arc::new(Mutex::new(Vec::new()));
        results(size, |world| {
            let group = world.world_group(Channel::Reduce);
            let layout = layout(size, 100);
            let inner = world.world_group(Channel::User);
            let refused = Arc::clone(&refused);
            let read = move || {
                let error = inner.barrier(tag()).map(drop).expect_err("refused");
                refused.lock().expect("not poisoned").push(error.to_string());
            };
            let reduced =
                reduce(&group, &layout, Arc::new(Reading(100, read))).and_then(Pending::wait);
            reduced.expect("the outer one completes");
        });
        let refused = refused.lock().expect("not poisoned");
        let expected = "called from inside the work of another operation";
        assert!(refused.iter().all(|text| text.ends_with(expected)));
        assert!(!refused.is_empty());
    }
}

#[test]
fn a_wait_from_inside_the_work_of_another_operation_is_refused() {
    for len in [100, LARGE] {
        let refused = Mutex::new(Vec::new());
        results(2, |world| {
            let outstanding = world.world_group(Channel::User).barrier(tag()).expect("issued");
            let outstanding = Mutex::new(Some(outstanding));
            let found: Arc<Mutex<Option<Result<(), Error>>>> = Arc::default();
            let finds = Arc::clone(&found);
            let read = move || {
                let outstanding = outstanding.lock().expect("not poisoned").take();
                if let Some(outstanding) = outstanding {
                    *finds.lock().expect("not poisoned") = Some(outstanding.wait());
                }
            };
            let group = world.world_group(Channel::Reduce);
            let reduced = reduce(&group, &layout(2, len), Arc::new(Reading(len, read)));
            reduced.and_then(Pending::wait).expect("the outer one completes");
            let found = found.lock().expect("not poisoned").take();
            refused.lock().expect("not poisoned").push((world.rank(), found));
        });
        for (rank, found) in refused.into_inner().expect("not poisoned") {
            let Some(Err(Error::Call(Reentrant { op, rank: of }))) = found else {
                panic!("{found:?}")
            };
            assert_eq!((op, of), (Op::Barrier, rank));
        }
    }
}

#[test]
fn a_contribution_may_own_the_last_handle_of_its_world() {
    // Dropped by whoever completes the operation, which may be a worker: it must not join itself.
    for _ in 0..20 {
        let mut worlds = World::local(2, WorldOptions::default());
        let layout = layout(2, 1_000_000);
        let second = worlds.pop().expect("two ranks");
        let first = worlds.pop().expect("two ranks");
        let [first, second] = [first, second].map(|world| {
            let group = world.world_group(Channel::Reduce);
            reduce(&group, &layout, Arc::new(Reading(1_000_000, move || drop(world.clone()))))
        });
        let wait =
            |pending: Result<Pending<_>, Error>| pending.and_then(Pending::wait).expect("reduced");
        assert_eq!((wait(first).partial[0], wait(second).partial[0]), (2.0, 2.0));
    }
}
