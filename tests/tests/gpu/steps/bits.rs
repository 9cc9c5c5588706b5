//! The same training on the host and on the device gives the same bits, and moves the same bytes.

use std::collections::BTreeMap;

use hsdp::{
    Accumulation, DType, Error, Histograms, ModelOptions, MomentumKind, Norms, Objective, Offload,
    Placement, Precision, StateOver, StepOptions, Values,
};
use hsdp_tests::support::worlds::on_ranks;

use super::super::assert_same;
use super::training::{Trained, Trainer, Training};
use super::{DEVICE, offloading, placed};

const STEPS: usize = 3;

/// SGD without momentum.
pub(super) const PLAIN: Trainer = Trainer::Sgd(0.0, MomentumKind::Classic);

pub(super) const TRAINERS: [Trainer; 5] = [
    PLAIN,
    Trainer::AdamW,
    Trainer::Sgd(0.9, MomentumKind::Classic),
    Trainer::Sgd(0.8, MomentumKind::Nesterov),
    Trainer::Lion,
];

fn trained(options: &ModelOptions, trainer: Trainer, begin: StepOptions) -> Vec<Trained> {
    let ranks = options.mesh.world_size();
    on_ranks(ranks, |world| Training::new(world, options, trainer, begin)?.train(STEPS))
}

/// Trains here and there, and compares all that is known.
pub(super) fn compare(options: &ModelOptions, trainer: Trainer, begin: StepOptions) {
    let on_host =
        trained(&ModelOptions { placement: Placement::Host, ..options.clone() }, trainer, begin);
    let on_device = trained(options, trainer, begin);
    for (rank, (found, expected)) in on_device.iter().zip(&on_host).enumerate() {
        let what = format!("rank {rank}, {trainer:?}, {begin:?}, {options:?}");
        compare_values(&found.parameters, &expected.parameters, &what);
        compare_values(&found.gradient, &expected.gradient, &format!("gradient, {what}"));
        assert_eq!(found.losses, expected.losses, "losses, {what}");
        assert_eq!(found.moved, expected.moved, "ledger, {what}");
        // Its squares are added up in another order there.
        for (found, expected) in found.norms.iter().zip(&expected.norms) {
            assert!((found - expected).abs() <= 1e-12 * expected, "norm {found}, not {expected}");
        }
    }
}

fn compare_values(
    found: &BTreeMap<String, Vec<f32>>,
    expected: &BTreeMap<String, Vec<f32>>,
    what: &str,
) {
    assert!(found.keys().eq(expected.keys()), "{what}");
    for (name, expected) in expected {
        assert_same(Values::F32(&found[name]), Values::F32(expected), &format!("{name} of {what}"));
    }
}

/// The `turn`-th mesh: every mode, with a wire, a dtype and an optimizer that the other meshes have
/// with other modes.
fn on_mesh(turn: usize, mesh: [usize; 2]) {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    for (mode, accumulation) in Accumulation::ALL.into_iter().enumerate() {
        let wire = dtypes[(turn + mode) % 3];
        let parameters = dtypes[(turn + mode / 2) % 2];
        for state in StateOver::ALL {
            let options = ModelOptions {
                accumulation,
                state,
                precision: Precision { parameters, wire, output: None },
                ..placed(DEVICE, mesh)
            };
            let trainer = TRAINERS[(3 * turn + mode) % 5];
            compare(&options, trainer, StepOptions::microbatches(3));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn one_rank_trains_to_the_bits_of_the_host() {
    on_mesh(0, [1, 1]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn two_shards_train_to_the_bits_of_the_host() {
    on_mesh(1, [1, 2]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn two_replicas_train_to_the_bits_of_the_host() {
    on_mesh(2, [2, 1]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn two_replicas_of_two_shards_train_to_the_bits_of_the_host() {
    on_mesh(3, [2, 2]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn two_replicas_of_three_shards_train_to_the_bits_of_the_host() {
    on_mesh(4, [2, 3]);
}

/// All-reduces and sums that wait are issued when the step ends.
#[test]
#[ignore = "needs a CUDA device"]
fn steps_of_as_many_microbatches_as_come_train_to_the_bits_of_the_host() {
    for accumulation in Accumulation::ALL {
        let options = ModelOptions { accumulation, ..placed(DEVICE, [2, 2]) };
        compare(&options, Trainer::AdamW, StepOptions::as_many_as_come());
    }
}

/// What is divided, when, and by what, is another for each.
#[test]
#[ignore = "needs a CUDA device"]
fn every_objective_trains_to_the_bits_of_the_host() {
    for objective in [Objective::RankMean, Objective::Sum, Objective::Factor(24.0)] {
        let precision =
            Precision { parameters: DType::BF16, wire: DType::BF16, ..Precision::default() };
        let options = ModelOptions { objective, precision, ..placed(DEVICE, [2, 2]) };
        compare(&options, PLAIN, StepOptions::microbatches(3));
    }
}

/// Norms and histograms of gradients and parameters, and the ratios of an update where it is on the
/// host.
type Measured = (Norms, Norms, Histograms, Histograms, Option<Norms>);

fn measured(placement: Placement) -> Vec<Measured> {
    on_ranks(4, |world| {
        let begin = StepOptions::microbatches(3);
        let mut training = Training::new(world, &placed(placement, [2, 2]), PLAIN, begin)?;
        training.run(1)?;
        let gradients = training.gradients()?;
        let model = &training.model;
        let norms = gradients.norms(model)?;
        let histograms = gradients.histograms(model)?;
        let of_parameters = (model.norms()?, model.histograms()?);
        let ratios = training.ratios(gradients)?;
        Ok((norms, of_parameters.0, histograms, of_parameters.1, ratios))
    })
}

/// They are computed on the host, of elements that have the same bits.
#[test]
#[ignore = "needs a CUDA device"]
fn norms_and_histograms_are_those_of_the_host() {
    let on_host = measured(Placement::Host);
    assert!(on_host.iter().all(|it| it.4.is_some()));
    assert_eq!(measured(offloading(Offload::All)), on_host);
    assert_eq!(measured(offloading(Offload::Optimizer)), on_host);
    for (on_device, on_host) in measured(DEVICE).into_iter().zip(on_host) {
        let (norms, of_parameters, histograms, of_values, _) = on_host;
        assert_eq!(on_device, (norms, of_parameters, histograms, of_values, None));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_update_on_a_device_cannot_be_measured() {
    let refused = on_ranks(1, |world| {
        let begin = StepOptions::microbatches(3);
        let mut training = Training::new(world, &placed(DEVICE, [1, 1]), Trainer::AdamW, begin)?;
        let gradients = training.gradients()?;
        let before = training.model.full_parameters()?;
        let refused = training.update(gradients.measured()).expect_err("it is on a device");
        assert_eq!(training.model.full_parameters()?, before, "nothing was changed");
        Ok::<_, Error>(refused.to_string())
    });
    let what = "an update on a device is not measured: do not call `Gradients::measured`";
    assert_eq!(refused[0], format!("optimizer step on rank 0, step 0: {what}"));
}
