//! Norms, clipping, learning rates and losses, against the gradient of the same items computed in one piece, in f64.

use std::collections::BTreeMap;

use hsdp::{
    Error, LearningRate, LossSum, ModelOptions, Objective, Optimizer, Sgd, SgdOptions,
    ShardedModel, StepOptions, Unused, World,
};
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::updates::Parameters;

const MESHES: [(usize, usize); 6] = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2)];

/// Replicas hold the same gradient: counting each would make the norm sqrt(R) times too long.
#[test]
fn the_norm_is_that_of_the_unsharded_gradient_on_every_mesh() {
    for (replicate, shard) in MESHES {
        let ranks = replicate * shard;
        let norms = on_ranks(ranks, |world| {
            let rank = world.rank().index();
            let mut model = model(world, &ModelOptions::on(mesh(replicate, shard)))?;
            let mut step = model.begin_step(StepOptions::microbatches(2))?;
            springs::microbatch(&mut step, Batch::of(rank, 0, 0))?;
            springs::microbatch(&mut step, Batch::of(rank, 0, 1))?;
            Ok(step.finish()?.norm())
        });
        let expected = norm(&reference(ranks));
        let norm = common(norms);
        assert!(
            (norm - expected).abs() <= 1e-6 * expected,
            "{replicate}x{shard}: {norm}, expected {expected}"
        );
    }
}

#[test]
fn clipping_scales_a_long_gradient_to_the_norm_and_leaves_a_short_one() {
    let norm = norm(&reference(4));
    for max_norm in [norm / 3.0, norm * 3.0] {
        let factor = f64::min(1.0, max_norm / (norm + 1e-6));
        let (trained, _) = one_update(max_norm);
        for (name, gradient) in reference(4) {
            let before = initial(&name);
            for ((after, before), gradient) in trained[&name].iter().zip(before).zip(gradient) {
                let expected = f64::from(before) - gradient * factor;
                assert!(
                    (f64::from(*after) - expected).abs() < 1e-5,
                    "{name}: {after}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn the_norm_that_is_told_is_that_before_clipping() {
    let (_, unclipped) = one_update(f64::INFINITY);
    let (_, clipped) = one_update(0.5);
    assert!(unclipped > 0.5);
    assert_eq!(clipped.to_bits(), unclipped.to_bits());
}

#[test]
fn each_step_uses_the_learning_rate_of_its_schedule() {
    let schedule = LearningRate::warmup_cosine(0.5, 0.125, 2, 6);
    let rates: Vec<f64> = (0..8).map(|step| schedule.at(step)).collect();
    assert_eq!((rates[0], rates[1], rates[6], rates[7]), (0.25, 0.5, 0.125, 0.125));
    let values = common(on_ranks(4, |world| {
        let mut model = model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let mut values = vec![model.full_parameters()?["third.bias"][7]];
        for rate in &rates {
            sgd.set_learning_rate(*rate);
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            slopes::microbatch(&mut step, 1.0)?;
            let gradients = step.finish()?;
            sgd.step(&mut model, gradients)?;
            values.push(model.full_parameters()?["third.bias"][7]);
        }
        Ok(values)
    }));
    for (pair, rate) in values.windows(2).zip(&rates) {
        assert!((f64::from(pair[0] - pair[1]) - rate).abs() < 1e-6, "{pair:?}, rate {rate}");
    }
}

#[test]
fn the_loss_of_a_step_is_that_of_its_objective() {
    let loss = |objective, weights: [u64; 4]| {
        let unused = Unused::Zeros;
        let options = ModelOptions { objective, unused, ..ModelOptions::on(mesh(2, 2)) };
        common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut model = model(world, &options)?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let mut pass = step.microbatch()?;
            let _ = pass.loss(LossSum::from_mean(
                f64::from(u8::try_from(rank).expect("small")),
                weights[rank],
            ))?;
            pass.finish()?;
            let gradients = step.finish()?;
            Ok((gradients.loss(), gradients.weight()))
        }))
    };
    assert_eq!(loss(Objective::WeightedMean, [1, 1, 1, 5]), (18.0 / 8.0, 8));
    assert_eq!(loss(Objective::RankMean, [1, 1, 1, 5]), (6.0 / 4.0, 8));
    assert_eq!(loss(Objective::WeightedMean, [0, 4, 0, 0]), (1.0, 4));
    assert_eq!(loss(Objective::Sum, [1, 1, 1, 5]), (18.0, 8));
    assert_eq!(loss(Objective::Factor(4.0), [1, 1, 1, 5]), (4.5, 8));
    assert_eq!(loss(Objective::Sum, [0, 0, 0, 0]), (0.0, 0));
}

/// Parameters and gradient norm of one update with learning rate 1 on four ranks.
fn one_update(max_norm: f64) -> (Parameters, f64) {
    common(on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut sgd = Sgd::new(&model, SgdOptions { learning_rate: 1.0, ..SgdOptions::default() });
        let mut step = model.begin_step(StepOptions::microbatches(2))?;
        springs::microbatch(&mut step, Batch::of(rank, 0, 0))?;
        springs::microbatch(&mut step, Batch::of(rank, 0, 1))?;
        let gradients = step.finish()?.clip(max_norm);
        let norm = gradients.norm();
        sgd.step(&mut model, gradients)?;
        Ok((model.full_parameters()?, norm))
    }))
}

/// The gradient of a first step of two microbatches on so many ranks, computed in one piece.
fn reference(ranks: usize) -> BTreeMap<String, Vec<f64>> {
    let parameters = three_units()
        .params()
        .map(|(_, param)| (param.name.clone(), springs::initial(param)))
        .collect();
    let batch = |microbatch| move |rank| Batch::of(rank, 0, microbatch);
    let batches: Vec<Batch> = (0..ranks).map(batch(0)).chain((0..ranks).map(batch(1))).collect();
    springs::mean_gradient(&three_units(), &parameters, &batches)
}

fn norm(gradient: &BTreeMap<String, Vec<f64>>) -> f64 {
    gradient.values().flatten().map(|element| element * element).sum::<f64>().sqrt()
}

fn initial(name: &str) -> Vec<f32> {
    let spec = three_units();
    springs::initial(&spec[spec.find(name).expect("a parameter of the model")])
}

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, three_units(), options.clone(), springs::initial)
}
