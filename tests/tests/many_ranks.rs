//! 256 ranks on however many cores there are: they train what one process trains.

use std::collections::BTreeMap;
use std::ops::Range;

use hsdp::{Accumulation, Error, ModelOptions, Optimizer, Sgd, SgdOptions, StepOptions, World};
use hsdp_tests::support::handmade::in_f32;
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

const RANKS: usize = 256;
const STEPS: u64 = 3;
const MICROBATCHES: usize = 2;
const LEARNING_RATE: f64 = 0.25;

/// Losses of the steps, gradient norms, and the parameters in the end.
#[derive(Clone, Debug, PartialEq)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    parameters: BTreeMap<String, Vec<f32>>,
}

/// Trains on a mesh; rank `r` sees what `r` of the 256 sees, or one rank what all of them see.
fn train(world: World, options: &ModelOptions) -> Result<Trained, Error> {
    let rank = world.rank().index();
    let alone = options.mesh.world_size() == 1;
    let mut model = springs::model(world, options)?;
    let mut sgd =
        Sgd::new(&model, SgdOptions { learning_rate: LEARNING_RATE, ..SgdOptions::default() });
    let mut losses = Vec::new();
    let mut norms = Vec::new();
    for number in 0..STEPS {
        let batches = batches(if alone { 0..RANKS } else { rank..rank + 1 }, number);
        let mut step = model.begin_step(StepOptions::microbatches(batches.len()))?;
        for batch in batches {
            springs::microbatch(&mut step, batch)?;
        }
        let gradients = step.finish()?;
        losses.push(gradients.loss());
        norms.push(gradients.norm());
        sgd.step(&mut model, gradients)?;
    }
    Ok(Trained { losses, norms, parameters: model.full_parameters()? })
}

/// What these ranks see in a step.
fn batches(ranks: Range<usize>, step: u64) -> Vec<Batch> {
    let of_all = |microbatch| ranks.clone().map(move |rank| Batch::of(rank, step, microbatch));
    (0..MICROBATCHES).flat_map(of_all).collect()
}

/// Losses and norms of one rank that sees everything; the parameters without the runtime, in f64.
fn in_one_process() -> Trained {
    let options = ModelOptions::on(mesh(1, 1));
    let trained = common(on_ranks(1, |world| train(world, &options)));
    let spec = three_units();
    let initial = spec.params().map(|(_, param)| (param.name.clone(), springs::initial(param)));
    let mut parameters: BTreeMap<String, Vec<f32>> = initial.collect();
    for step in 0..STEPS {
        for (name, slope) in springs::mean_gradient(&spec, &parameters, &batches(0..RANKS, step)) {
            for (value, slope) in parameters.get_mut(&name).expect("its own").iter_mut().zip(slope)
            {
                *value = in_f32(f64::from(*value) - LEARNING_RATE * slope);
            }
        }
    }
    Trained { parameters, ..trained }
}

/// A sum over 256 ranks in their order is rounded 256 times, by at most 2^-24 of itself as long as
/// it only grows.
const BOUND: f64 = RANKS as f64 / (1 << 24) as f64;

fn assert_close(trained: &Trained, reference: &Trained, what: &str) {
    let close = |one: f64, other: f64| (one - other).abs() <= BOUND * other.abs().max(1.0);
    let of_steps = |it: &Trained| it.losses.iter().chain(&it.norms).copied().collect::<Vec<_>>();
    for (one, other) in of_steps(trained).into_iter().zip(of_steps(reference)) {
        assert!(close(one, other), "{what}, a loss or a norm: {one}, in one process {other}");
    }
    for (name, values) in &reference.parameters {
        for (one, other) in trained.parameters[name].iter().zip(values) {
            let [one, other] = [*one, *other].map(f64::from);
            assert!(close(one, other), "{what}, {name}: {one}, in one process {other}");
        }
    }
}

#[test]
fn on_256_ranks_the_model_is_that_of_one_process() {
    let reference = in_one_process();
    for (replicate, shard) in [(16, 16), (1, RANKS), (RANKS, 1)] {
        let options = ModelOptions::on(mesh(replicate, shard));
        let trained = common(on_ranks(RANKS, |world| train(world, &options)));
        assert_close(&trained, &reference, &format!("{replicate} x {shard}"));
    }
}

#[test]
fn in_the_other_modes_too() {
    let reference = in_one_process();
    for accumulation in [Accumulation::Every, Accumulation::Local] {
        let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(32, 8)) };
        let trained = common(on_ranks(RANKS, |world| train(world, &options)));
        assert_close(&trained, &reference, &accumulation.to_string());
    }
}
