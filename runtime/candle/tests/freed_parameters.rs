//! Full parameters are freed after each use, and all are freed in the end, as the allocator counts.

#[path = "graph/common.rs"]
mod common;

use std::sync::{Arc, Mutex};

use candle_core::{Result, Tensor};
use hsdp::memory::{self, Category, CountingAllocator};
use hsdp::{Mesh, ModelOptions, ModelSpec, Rank, StepOptions, Unit, World};
use hsdp_candle::{Parameters, Pass, UnitsExt};

use common::{input, layer, layer_unit, layers, sharded_with};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const WIDTH: usize = 64;
/// Bytes of one layer: a weight and a bias, in f32.
const LAYER: u64 = 4 * (64 * 64 + 64);

fn live(rank: Rank) -> u64 {
    memory::usage(rank, Category::Full).live.get()
}

/// Runs `look` on two shards that gather nothing ahead, with the loss of three layers after each of
/// them.
fn forward(pass: &Pass<'_>, mut look: impl FnMut(usize)) -> Result<Tensor> {
    let mut x = input(0, 4, WIDTH);
    for index in 0..3 {
        x = pass.unit(&format!("layer.{index}"), &x, |p, x| layer(p, index, x))?;
        look(index);
    }
    x.sqr()?.mean_all()
}

/// One test, because the counters belong to the whole process.
#[test]
fn parameters_make_room_after_forward_and_after_backward() {
    common::results(2, |world| {
        let rank = world.rank();
        let spec = layers(1, WIDTH).unit(layer_unit(1, WIDTH).keep()).unit(layer_unit(2, WIDTH));
        let options =
            ModelOptions { prefetch: 0, ..ModelOptions::on(Mesh::new(1, 2).expect("two shards")) };
        let mut model = sharded_with(world, spec, options);
        let planned = model.plan().memory().full.get();
        assert_eq!(planned, 2 * LAYER, "the second, which is kept, and one more");
        let mut step = model.begin_step(StepOptions::microbatches(2)).expect("a step");

        // A layer is freed after its forward, before the next one is gathered, though the graph
        // stays alive.
        let pass = Pass::new(step.microbatch().expect("the first")).expect("a pass");
        let mut after = Vec::new();
        let loss = forward(&pass, |_| after.push(live(rank))).expect("a forward");
        assert_eq!(after, [LAYER, LAYER, 2 * LAYER]);
        pass.backward(&loss, 1).expect("a backward");
        assert_eq!(live(rank), planned, "after the backward, with the graph alive");
        drop(loss);

        // A microbatch that is dropped frees its parameters, though its graph lives on.
        let pass = Pass::new(step.microbatch().expect("the second")).expect("a pass");
        let loss = forward(&pass, |_| ()).expect("a forward");
        assert_eq!(live(rank), planned);
        drop(pass);
        drop(step);
        assert_eq!(live(rank), 0, "after the step was dropped");
        drop(loss);
    });
    common::results(2, recomputed_units_with_frozen_parameters_make_room);
    common::results(2, units_of_a_critic_make_room_in_the_backward_of_another_model);
}

/// The forwards of the backward see one layer each: those behind them are freed, though they have
/// frozen parameters.
fn recomputed_units_with_frozen_parameters_make_room(world: World) {
    let rank = world.rank();
    let freeze = |mut unit: Unit| {
        unit.params[0] = unit.params[0].clone().frozen();
        unit
    };
    let spec = layers(3, WIDTH)
        .units()
        .iter()
        .cloned()
        .map(freeze)
        .fold(ModelSpec::new(), ModelSpec::unit);
    let options =
        ModelOptions { prefetch: 0, ..ModelOptions::on(Mesh::new(1, 2).expect("two shards")) };
    let mut model = sharded_with(world, spec, options);
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let pass = Pass::new(step.microbatch().expect("the first")).expect("a pass");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut x = input(0, 4, WIDTH);
    for index in 0..3 {
        let seen = Arc::clone(&seen);
        let forward = move |p: &dyn Parameters, x: &Tensor| {
            seen.lock().expect("no panic").push(live(rank));
            layer(p, index, x)
        };
        x = pass.recomputed(&format!("layer.{index}"), &x, forward).expect("a forward");
    }
    let loss = x.sqr().and_then(|x| x.mean_all()).expect("a loss");
    pass.backward(&loss, 1).expect("a backward");
    let _ = step.finish().expect("a step");
    assert_eq!(*seen.lock().expect("no panic"), [LAYER; 6]);
}

/// The backward of a loss through another model frees each unit of it when it leaves the unit. Each
/// model has memory for one layer.
fn units_of_a_critic_make_room_in_the_backward_of_another_model(world: World) {
    let rank = world.rank();
    let options =
        || ModelOptions { prefetch: 0, ..ModelOptions::on(Mesh::new(1, 2).expect("two shards")) };
    let mut model = sharded_with(world.clone(), layers(1, WIDTH), options());
    let mut critic = sharded_with(world, layers(3, WIDTH), options());
    assert_eq!(critic.plan().memory().full.get(), LAYER);
    for recomputed in [false, true] {
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let mut evaluation = critic.evaluation_with_backward().expect("an evaluation");
        let pass = Pass::new(step.microbatch().expect("the first")).expect("a pass");
        let of_critic = Pass::new(evaluation.batch().expect("the first")).expect("a pass");
        let x = pass.unit("layer.0", &input(0, 4, WIDTH), |p, x| layer(p, 0, x));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut x = x.expect("a forward");
        for index in 0..3 {
            let seen = Arc::clone(&seen);
            let forward = move |p: &dyn Parameters, x: &Tensor| {
                seen.lock().expect("no panic").push(live(rank));
                layer(p, index, x)
            };
            let run = common::Runner { units: &of_critic, recomputed };
            x = run.run(&format!("layer.{index}"), &x, forward).expect("a forward");
        }
        let loss = x.sqr().and_then(|x| x.mean_all()).expect("a loss");
        pass.backward(&loss, 1).expect("a backward");
        seen.lock().expect("no panic").push(live(rank));
        of_critic.finish().expect("the end of the batch");
        evaluation.finish().expect("the end of the evaluation");
        let _ = step.finish().expect("a step");
        let runs = if recomputed { 6 } else { 3 };
        assert_eq!(*seen.lock().expect("no panic"), vec![2 * LAYER; runs + 1], "{recomputed}");
    }
}
