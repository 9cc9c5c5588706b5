//! A rank that panics ends the world by name.

use std::sync::Mutex;
use std::time::Instant;

use hsdp_comm::{WorldOptions, launch};

use super::{PROMPTLY, sum};

/// Notes when it is dropped.
struct Stamp<'a>(&'a Mutex<Option<Instant>>);

impl Drop for Stamp<'_> {
    fn drop(&mut self) {
        *self.0.lock().expect("not poisoned") = Some(Instant::now());
    }
}

#[test]
fn a_panic_reaches_all_others_with_its_message_promptly() {
    let panicked = Mutex::new(None);
    let ends = launch(4, WorldOptions::default(), |world| {
        world.set_step(7);
        sum(&world, vec![1.0]).expect("the first one is complete");
        if world.rank().index() == 2 {
            // The panic's hook runs first, and may take its time for a backtrace.
            let _unwinding = Stamp(&panicked);
            panic!("batch {} is bad", 12);
        }
        let end = sum(&world, vec![1.0]).expect_err("rank 2 panics");
        (end, Instant::now())
    });
    let panicked = panicked.into_inner().expect("not poisoned").expect("rank 2 panicked");
    for (rank, end) in ends.into_iter().enumerate() {
        if rank == 2 {
            assert_eq!(end.expect_err("it panicked").to_string(), "rank 2: batch 12 is bad");
            continue;
        }
        let (end, when) = end.expect("no panic");
        assert!(when - panicked < PROMPTLY);
        assert_eq!(
            end.to_string(),
            "world aborted: rank 2, step 7, last in all_reduce sum f32 1 element, all_reduce, step 7, \
             microbatch 0: it panicked: batch 12 is bad"
        );
    }
}
