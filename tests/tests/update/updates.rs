//! The way from a finished step to changed parameters: norms, clipping, learning rates, losses, and
//! optimizers.

mod clipping;
mod forgotten;
mod groups;
mod norms_and_rates;
mod own_optimizer;
mod refusals;
mod skipped;

use std::collections::BTreeMap;

use hsdp::{Gradients, Mesh, ModelOptions, ShardedModel, StepOptions, World};
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;

type Parameters = BTreeMap<String, Vec<f32>>;

/// The gradients of a step of one microbatch, whose every element is 1.
fn gradients(model: &mut ShardedModel) -> Gradients {
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    slopes::microbatch(&mut step, 1.0).expect("a microbatch");
    step.finish().expect("gradients")
}

fn parameters(model: &ShardedModel) -> Parameters {
    model.full_parameters().expect("parameters")
}

/// A model on one rank.
fn model() -> ShardedModel {
    let options = ModelOptions::on(Mesh::SINGLE);
    springs::model(World::single(), &options).expect("a model")
}
