//! A rank drops a step while another of its threads waits in that step.

use std::thread;
use std::time::{Duration, Instant};

use hsdp::{Error, ModelOptions, Step, StepOptions, UnitOrder, World, WorldOptions};
use hsdp_comm::{Channel, Op, Pending, Tag};
use hsdp_tests::support::models::unit;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::mesh;

const DEADLINE: Duration = Duration::from_secs(60);

/// Rank 1 asks for no unit. A thread of rank 0 waits for one, inside the engine, when rank 0 drops
/// the step: the drop tells all ranks at once, and the thread that waits gets the same error as
/// rank 1.
#[test]
fn a_drop_is_announced_though_another_thread_waits_in_the_step() {
    // In the declared order the thread waits in a gather; while the order is found, in an exchange.
    for order in [UnitOrder::Error, UnitOrder::Follow] {
        a_drop_is_announced(order);
    }
}

fn a_drop_is_announced(order: UnitOrder) {
    let started = Instant::now();
    let options = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    let ends = hsdp::launch(2, options, |world| -> Result<String, Error> {
        let options = ModelOptions { order, ..ModelOptions::on(mesh(1, 2)) };
        let mut model = springs::model(world.clone(), &options)?;
        let step = model.begin_step(StepOptions::microbatches(1))?;
        match world.rank().index() {
            0 => dropped_under_a_thread(step, &world),
            _ => told(&world),
        }
    });
    for end in ends {
        let end = end.expect("it ends as it should");
        let expected =
            "step 0 aborted by rank 0: the step was dropped while another thread was in it";
        assert_eq!(end, expected);
    }
    assert!(started.elapsed() < DEADLINE / 2, "{:?}", started.elapsed());
}

fn dropped_under_a_thread(mut step: Step<'_>, world: &World) -> Result<String, Error> {
    let handle = step.microbatch()?.handle();
    let before = world.ledger();
    let calls = |channel| world.ledger().since(&before).op(channel, Op::AllGather).calls;
    let waiting = thread::spawn(move || handle.unshard(unit(0)).map(drop));
    while calls(Channel::Gather) + calls(Channel::Control) == 0 {
        thread::yield_now();
    }
    drop(step);
    let error = waiting.join().expect("no panic").expect_err("the step is gone");
    Ok(error.to_string())
}

/// The error of a rank that waits for something else in the meantime.
fn told(world: &World) -> Result<String, Error> {
    // It may come to it when rank 0 has said so already: then it is the call that fails.
    let met = world.world_group(Channel::User).barrier(Tag::default()).and_then(Pending::wait);
    Ok(met.expect_err("rank 0 does not come").to_string())
}
