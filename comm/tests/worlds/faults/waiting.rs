//! Faults that hold a rank up: delay, freeze.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use hsdp_comm::CallError::Injected;
use hsdp_comm::{Channel, Error, Fault, FaultKind, Stage, World, WorldOptions};
use hsdp_sharding::{Rank, UnitId};

use super::{
    CULPRIT, PROMPTLY, SUM, assert_names, common_end, gather, options, promptly, settled, steps,
    tag,
};

#[test]
fn delay() {
    let delay = Duration::from_millis(300);
    let fault = Fault::at(CULPRIT, 1, UnitId::new(1), FaultKind::Delay(delay));
    let outcomes = promptly(options([fault]), |world| {
        let started = Instant::now();
        (steps(&world), started.elapsed())
    });
    for outcome in outcomes {
        let (sum, time) = outcome.expect("no panic");
        assert_eq!(sum, Ok(SUM), "a late rank is not dead");
        assert!(time >= delay);
    }
}

#[test]
fn a_delay_ends_with_the_world() {
    let fault = Fault::at(CULPRIT, 0, Stage::Gather, FaultKind::Delay(Duration::MAX));
    let end = common_end(promptly(options([fault]), |world| {
        if world.rank() == Rank::new(0) {
            world.abort("enough");
        }
        settled(gather(&world, 0))
    }));
    assert_names(&end, &["world aborted: rank 0, step 0", "enough"]);
}

#[test]
fn freeze() {
    let deadline = Duration::from_secs(1);
    let fault = Fault::at(CULPRIT, 1, (UnitId::new(1), Stage::Reduce), FaultKind::Freeze);
    let options = WorldOptions { deadline, ..options([fault]) };
    // The deadline does not include the start of the threads, which a busy machine delays.
    let all = Barrier::new(3);
    let end = common_end(promptly(options, move |world| {
        all.wait();
        steps(&world)
    }));
    let expected = [
        "world aborted: rank 1, step 1, last in all_gather f32 4 elements, unit 1, gather",
        "deadline of 1s missed in all_reduce sum f32 5 elements, unit 1, reduce",
        "arrived: ranks [0, 2], missing: ranks [1]",
    ];
    assert_names(&end, &expected);
}

#[test]
fn a_frozen_rank_that_nobody_waits_for_goes_on_when_all_others_have_left() {
    let fault = Fault::at(CULPRIT, 0, Stage::Gather, FaultKind::Freeze);
    let mut outcomes = promptly(options([fault]), |world| {
        if world.rank() == CULPRIT { settled(gather(&world, 0)).map(drop) } else { Ok(()) }
    });
    let own = outcomes.remove(CULPRIT.index()).expect("no panic").expect_err("it is alone");
    assert!(matches!(own, Error::Call(Injected { rank: CULPRIT, step: 0, .. })), "{own}");
    assert_names(&own.to_string(), &["until all others had left, in unit 0, gather"]);
    assert_eq!(outcomes, [Ok(Ok(())), Ok(Ok(()))]);
}

#[test]
fn an_aborted_step_does_not_thaw_a_rank_but_the_end_of_the_world_does() {
    let fault = Fault::at(CULPRIT, 0, Stage::Gather, FaultKind::Freeze);
    let worlds = World::local(2, options([fault]));
    let [first, second]: [World; 2] = worlds.try_into().expect("two ranks");
    let watched = second.clone();
    let frozen = std::thread::spawn(move || settled(gather(&second, 0)));
    let started = Instant::now();
    while !watched.armed_faults().is_empty() && started.elapsed() < PROMPTLY {
        std::thread::yield_now();
    }
    drop(watched);
    first.abort_step(hsdp_comm::StepFailure { step: 0, reason: "no data".to_owned() });
    first.next_epoch();
    let group = first.world_group(Channel::User);
    let barrier = group.barrier(tag(Stage::User, 0)).expect("the world goes on");
    assert!(!frozen.is_finished());
    first.abort("enough");
    let started = Instant::now();
    let end = frozen.join().expect("no panic").expect_err("the world is over");
    assert!(started.elapsed() < PROMPTLY);
    assert_eq!(Some(&end), first.end().as_ref());
    assert_eq!(barrier.wait(), Err(end));
}
