//! A rank that panics ends the world by name.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{Error, StepFailure, World, WorldOptions};

use super::{PROMPTLY, sum};
use crate::common::outcomes;

/// Notes when it is dropped.
struct Stamp<'a>(&'a Mutex<Option<Instant>>);

impl Drop for Stamp<'_> {
    fn drop(&mut self) {
        *self.0.lock().expect("not poisoned") = Some(Instant::now());
    }
}

/// Gives up the step of its rank when it is dropped, as a model's step does.
struct Step<'a>(&'a World);

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.0.abort_step(StepFailure { step: 7, reason: "the rank panicked".to_owned() });
    }
}

fn gives_up_a_step_in_a_panic(world: &World) {
    let _step = Step(world);
    panic!("batch 12 is bad");
}

#[test]
fn a_panic_is_told_as_the_end_of_the_world_and_not_of_the_step_before() {
    for _ in 0..20 {
        let ends = outcomes(3, WorldOptions::default(), |world| {
            if world.rank().index() == 1 {
                gives_up_a_step_in_a_panic(&world);
            }
            sum(&world, vec![1.0]).expect_err("rank 1 panics")
        });
        for (rank, end) in ends.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
            let end = end.expect("no panic");
            assert!(matches!(end, Error::World(Aborted { .. })), "rank {rank}: {end}");
        }
    }
}

/// No rank ends the world then: the others are to hear of the step at last.
#[test]
fn a_panic_that_is_caught_is_the_end_of_the_step_from_the_next_call_on() {
    let ends = outcomes(3, WorldOptions::default(), |world| {
        if world.rank().index() == 1 {
            let panics = AssertUnwindSafe(|| gives_up_a_step_in_a_panic(&world));
            catch_unwind(panics).expect_err("it panics");
        }
        let end = sum(&world, vec![1.0]).expect_err("rank 1 panicked");
        world.next_epoch();
        (end.to_string(), sum(&world, vec![1.0]))
    });
    for end in ends {
        let told = "step 7 aborted by rank 1: the rank panicked".to_owned();
        assert_eq!(end, Ok((told, Ok(vec![3.0]))));
    }
}

/// A thread that nobody watches says itself that its step has ended; then it is gone.
#[test]
fn a_panic_of_a_programs_own_thread_ends_its_step_at_once() {
    let mut worlds = World::local(2, WorldOptions::default()).into_iter();
    let [first, second] = [(); 2].map(|()| worlds.next().expect("two ranks"));
    let panics = thread::spawn(move || gives_up_a_step_in_a_panic(&second));
    let told = sum(&first, vec![1.0]).expect_err("rank 1 panics");
    panics.join().expect_err("it panics");
    assert_eq!(told.to_string(), "step 7 aborted by rank 1: the rank panicked");
    first.next_epoch();
    let gone = sum(&first, vec![1.0]).expect_err("rank 1 is gone").to_string();
    assert!(gone.contains("rank 1") && gone.contains("it left, but others wait for it"), "{gone}");
}

#[test]
fn a_panic_reaches_all_others_with_its_message_promptly() {
    let panicked = Mutex::new(None);
    let ends = outcomes(4, WorldOptions::default(), |world| {
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
