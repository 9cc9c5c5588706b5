//! Runs with state over the world have the bits of runs with state over shards.

use hsdp::checkpoint::Checkpointed;
use hsdp::{Accumulation, DType, LossScaling, Mesh, ModelOptions, NonFinite, Precision, StateOver};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::training::{self, Recipe, Trace, Training};

const STEPS: usize = 4;

pub(crate) fn meshes() -> [Mesh; 4] {
    [mesh(2, 2), mesh(2, 3), mesh(3, 2), mesh(4, 1)]
}

/// Returns options in f32, in bf16, and in f16 with a dynamic scale that overflows at first.
fn precisions() -> [(Precision, LossScaling); 3] {
    let of = |dtype| Precision { parameters: dtype, wire: dtype, ..Precision::default() };
    [
        (of(DType::F32), LossScaling::Off),
        (of(DType::BF16), LossScaling::Off),
        (of(DType::F16), LossScaling::Dynamic(hsdp::DynamicScale::default())),
    ]
}

/// Returns what the steps of a run end with, the same on all ranks.
fn trained<O: Checkpointed>(recipe: &Recipe<O>, options: &ModelOptions) -> Vec<Trace> {
    let ranks = options.mesh.world_size();
    common(on_ranks(ranks, |world| Training::new(world, recipe, options)?.train(STEPS)))
}

/// Compares a run with state over the world with one with state over shards, step by step.
pub(crate) fn compare<O: Checkpointed>(recipe: &Recipe<O>, options: &ModelOptions) {
    let [shards, world] =
        StateOver::ALL.map(|state| trained(recipe, &ModelOptions { state, ..options.clone() }));
    let context = format!(
        "{} on {}, {}, {}",
        recipe.name, options.mesh, options.accumulation, options.precision.parameters
    );
    for (step, (world, shards)) in world.iter().zip(&shards).enumerate() {
        assert_same(world, shards, &format!("step {step} of {context}"));
    }
}

/// Fails with the first difference between two traces.
fn assert_same(got: &Trace, expected: &Trace, context: &str) {
    for (what, got, expected) in [
        ("gradient", &got.gradients, &expected.gradients),
        ("parameter", &got.parameters, &expected.parameters),
        ("average", &got.averages, &expected.averages),
    ] {
        for (name, values) in got {
            let at = values.iter().zip(&expected[name]).position(|(got, expected)| got != expected);
            assert_eq!(at, None, "{context}: {what} {name} differs from this element on");
        }
    }
    assert_eq!(got, expected, "{context}");
}

/// Compares both modes on all meshes, in all modes of accumulation and all precisions.
fn compare_all<O: Checkpointed>(recipe: &Recipe<O>) {
    for on in meshes() {
        for accumulation in Accumulation::ALL {
            for (precision, loss_scaling) in precisions() {
                let options = ModelOptions {
                    accumulation,
                    precision,
                    loss_scaling,
                    non_finite: NonFinite::Skip,
                    ..ModelOptions::on(on)
                };
                compare(recipe, &options);
            }
        }
    }
}

#[test]
fn adamw_has_the_same_bits() {
    compare_all(&training::adamw());
}

#[test]
fn adamw_in_eight_bits_has_the_same_bits() {
    compare_all(&training::eight_bit());
}

#[test]
fn sgd_has_the_same_bits() {
    compare_all(&training::sgd());
}

#[test]
fn lion_has_the_same_bits() {
    compare_all(&training::lion());
}

#[test]
fn adafactor_has_the_same_bits() {
    compare_all(&training::adafactor());
}

#[test]
fn muon_has_the_same_bits() {
    compare_all(&training::muon());
}

#[test]
fn whole_parameters_have_the_same_bits() {
    compare_all(&training::owned());
}
