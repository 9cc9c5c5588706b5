//! Averages and divide factors, as ranks on threads see them: each contribution is divided by the
//! objective's divisor, once, whatever the mesh, the wire, the mode, and the microbatch that it
//! comes in.
//!
//! The runtime's own tests check the plan of divides; these check the gradients that arrive.

use hsdp::{
    Accumulation, DType, Error, GradientError, LossScaling, LossSum, Mesh, ModelOptions, Objective,
    Param, Precision, ShardedModel, StepOptions, UnitGradients, World,
};
use hsdp_tests::support::models::{one_parameter, unit};
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

const WIRES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The gradient that a rank computes in a microbatch.
type Gradient<'a> = &'a (dyn Fn(usize, usize) -> Vec<f32> + Sync);

fn options(mesh: Mesh, wire: DType, objective: Objective) -> ModelOptions {
    let precision = Precision { wire, ..Precision::default() };
    ModelOptions { precision, objective, ..ModelOptions::on(mesh) }
}

/// One step on a model of one parameter: its whole gradient, the same on all ranks.
fn reduced(options: &ModelOptions, microbatches: usize, gradient: Gradient<'_>) -> Vec<f32> {
    let known = StepOptions::microbatches(microbatches);
    let step = |world| one_step(world, options.clone(), known, microbatches, gradient);
    common(on_ranks(options.mesh.world_size(), step))
}

fn one_step(
    world: World,
    options: ModelOptions,
    announced: StepOptions,
    microbatches: usize,
    gradient: Gradient<'_>,
) -> Result<Vec<f32>, Error> {
    let rank = world.rank().index();
    let spec = one_parameter(gradient(rank, 0).len());
    let mut model =
        ShardedModel::new(world, spec, options, |param: &Param| vec![0.0; param.numel()])?;
    let mut step = model.begin_step(announced)?;
    for microbatch in 0..microbatches {
        let mut pass = step.microbatch()?;
        let seed = hsdp_tests::support::handmade::in_f32(pass.loss(LossSum::new(0.0, 1))?.value());
        let seeded: Vec<f32> =
            gradient(rank, microbatch).iter().map(|value| value * seed).collect();
        pass.reduce(unit(0), UnitGradients::of([seeded]))?;
        pass.finish()?;
    }
    let mut full = step.finish()?.full(&model)?;
    Ok(full.remove("w").expect("the model has one parameter"))
}

/// Zeros but for one element.
fn only(element: usize, value: f32, len: usize) -> Vec<f32> {
    let mut gradient = vec![0.0; len];
    gradient[element] = value;
    gradient
}

fn count(number: usize) -> f32 {
    f32::from(u16::try_from(number).expect("a small number"))
}

/// The number by which a contribution is divided in all, on a world of `ranks` with microbatches of
/// weight 1.
fn divisor(objective: Objective, ranks: usize, microbatches: usize) -> f32 {
    match objective {
        Objective::RankMean => count(ranks),
        Objective::WeightedMean => count(ranks * microbatches),
        Objective::Sum => 1.0,
        Objective::Factor(factor) => hsdp_tests::support::handmade::in_f32(factor),
        objective => panic!("{objective:?} is not in this table"),
    }
}

/// The ledger of divides, kept in the data: each rank in each microbatch has an element of its own,
/// in which it contributes the divisor and the other ranks nothing. Each comes out as 1 if all the
/// divides that were applied to that contribution multiply to the divisor.
#[test]
fn every_contribution_is_divided_by_the_divisor_exactly_once() {
    const MICROBATCHES: usize = 3;
    let objectives = [
        Objective::RankMean,
        Objective::WeightedMean,
        Objective::Sum,
        Objective::Factor(8.0),
        Objective::Factor(12.0),
    ];
    for mesh in [mesh(2, 8), mesh(3, 2), mesh(4, 8)] {
        let ranks = mesh.world_size();
        for wire in WIRES {
            for accumulation in Accumulation::ALL {
                for objective in objectives {
                    let options = ModelOptions { accumulation, ..options(mesh, wire, objective) };
                    let divisor = divisor(objective, ranks, MICROBATCHES);
                    let own = |rank, microbatch| {
                        only(microbatch * ranks + rank, divisor, ranks * MICROBATCHES)
                    };
                    let arrived = reduced(&options, MICROBATCHES, &own);
                    assert_eq!(
                        arrived,
                        vec![1.0; ranks * MICROBATCHES],
                        "{mesh} {wire} {accumulation} {objective:?}"
                    );
                }
            }
        }
    }
}

/// The example of PyTorch's pull request 125484: 4 x 8 ranks, rank i has the gradient m i in
/// microbatch m of two.
#[test]
fn the_golden_numbers_of_a_4x8_mesh() {
    for wire in WIRES {
        for accumulation in Accumulation::ALL {
            let options =
                ModelOptions { accumulation, ..options(mesh(4, 8), wire, Objective::RankMean) };
            let golden =
                reduced(&options, 2, &|rank, microbatch| vec![count((microbatch + 1) * rank)]);
            assert_eq!(golden, [46.5], "{wire} {accumulation}");
        }
    }
}

/// The values that each of its reduce-scatters adds to a partial. Each replica in each microbatch
/// has an element of its own, so that the result is the partials, one by one, over the four
/// replicas.
#[test]
fn the_golden_partials_of_a_4x8_mesh() {
    for wire in WIRES {
        let options = options(mesh(4, 8), wire, Objective::RankMean);
        let own = |rank: usize, microbatch: usize| {
            only(microbatch * 4 + rank / 8, count((microbatch + 1) * rank), 8)
        };
        let partials: Vec<f32> =
            reduced(&options, 2, &own).iter().map(|quarter| 4.0 * quarter).collect();
        assert_eq!(partials, [3.5, 11.5, 19.5, 27.5, 7.0, 23.0, 39.0, 55.0], "{wire}");
    }
}

/// What FSDP2 gives on 2 x 2 ranks whose gradients are 1 to 4 times their number, and ten times
/// that in the second of two microbatches: on every wire, whenever it is communicated.
#[test]
fn the_golden_numbers_of_a_2x2_mesh() {
    let own = |rank: usize, microbatch: usize| {
        (1..=4).map(|element| count(element * (rank + 1) * (1 + 9 * microbatch))).collect()
    };
    for wire in WIRES {
        for accumulation in Accumulation::ALL {
            let options =
                ModelOptions { accumulation, ..options(mesh(2, 2), wire, Objective::RankMean) };
            let [first, both] = [1, 2].map(|microbatches| reduced(&options, microbatches, &own));
            assert_eq!(first, [2.5, 5.0, 7.5, 10.0], "{wire} {accumulation}");
            assert_eq!(both, [27.5, 55.0, 82.5, 110.0], "{wire} {accumulation}");
        }
    }
}

/// An all-reduce that follows in the same microbatch changes nothing about what its reduce-scatter
/// adds: neither where the number of microbatches is known beforehand, nor where it is not.
#[test]
fn a_partial_has_one_scale() {
    const MICROBATCHES: usize = 4;
    for mesh in [mesh(2, 8), mesh(3, 2), mesh(4, 8)] {
        for wire in WIRES {
            for accumulation in Accumulation::ALL {
                let options =
                    ModelOptions { accumulation, ..options(mesh, wire, Objective::RankMean) };
                let own = |_, microbatch| only(microbatch, 1.0, MICROBATCHES);
                for announced in [StepOptions::microbatches(MICROBATCHES), StepOptions::default()] {
                    let step =
                        |world| one_step(world, options.clone(), announced, MICROBATCHES, &own);
                    let arrived = common(on_ranks(mesh.world_size(), step));
                    assert_eq!(
                        arrived, [1.0; MICROBATCHES],
                        "{mesh} {wire} {accumulation} {announced:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn an_f16_wire_carries_gradients_at_the_top_of_its_range() {
    for mesh in [mesh(2, 8), mesh(3, 2), mesh(4, 8), mesh(1, 4), mesh(4, 1)] {
        let options = options(mesh, DType::F16, Objective::RankMean);
        assert_eq!(reduced(&options, 1, &|_, _| vec![60000.0]), [60000.0], "{mesh}");
    }
    // Nearly all of the range is in the sum; a contribution is the 32nd part of it.
    let sum = options(mesh(4, 8), DType::F16, Objective::Sum);
    assert_eq!(reduced(&sum, 1, &|_, _| vec![1875.0]), [60000.0]);
}

/// Dividing by all 32 ranks at once would leave 2^-27, which is 0 in f16; 2^-24 is its smallest
/// number.
#[test]
fn an_f16_wire_carries_gradients_that_one_division_would_lose() {
    let least = 2f32.powi(-22);
    let options = options(mesh(4, 8), DType::F16, Objective::RankMean);
    assert_eq!(reduced(&options, 1, &|_, _| vec![least]), [least]);
}

/// 6e-8 is the last number before 0 in f16. Without a loss scale it may be lost, but no more than
/// that; with one it arrives with the precision of the wire.
#[test]
fn an_f16_wire_and_gradients_at_the_bottom_of_its_range() {
    const TINY: f32 = 6e-8;
    for mesh in [mesh(2, 8), mesh(3, 2), mesh(4, 8), mesh(1, 4), mesh(4, 1)] {
        let unscaled = options(mesh, DType::F16, Objective::RankMean);
        let scaled = ModelOptions { loss_scaling: LossScaling::Fixed(65536.0), ..unscaled.clone() };
        let [lossy, kept] =
            [&unscaled, &scaled].map(|options| reduced(options, 1, &|_, _| vec![TINY])[0]);
        assert!((lossy - TINY).abs() <= 2e-7, "{mesh}: {lossy}");
        assert!((kept - TINY).abs() <= 2f32.powi(-10) * TINY, "{mesh}: {kept}");
    }
}

/// The pre-divides make room for sums, but no more than sums need: gradients that they push below
/// the last number of f16 stay within 2e-7 a contribution, even where all ranks have the same
/// gradient and all roundings go the same way.
#[test]
fn an_f16_wire_loses_no_more_of_tiny_gradients_than_the_conformance_format_allows() {
    let tiny: Vec<f32> = (1..500).map(|index| 6e-9 * count(index)).collect();
    for mesh in [mesh(5, 1), mesh(8, 1), mesh(1, 8), mesh(2, 3), mesh(2, 4)] {
        for microbatches in [1, 5, 9, 17] {
            for accumulation in Accumulation::ALL {
                for (objective, divisor) in
                    [(Objective::RankMean, count(mesh.world_size())), (Objective::Factor(2.0), 2.0)]
                {
                    let options =
                        ModelOptions { accumulation, ..options(mesh, DType::F16, objective) };
                    let arrived = reduced(&options, microbatches, &|_, _| tiny.clone());
                    let contributions = f64::from(count(microbatches * mesh.world_size()));
                    for (arrived, tiny) in arrived.iter().zip(&tiny) {
                        let sum = contributions * f64::from(*tiny);
                        let bound =
                            (2f64.powi(-10) * sum + 2e-7 * contributions) / f64::from(divisor);
                        let error = (f64::from(*arrived) - sum / f64::from(divisor)).abs();
                        assert!(
                            error <= bound,
                            "{mesh} {microbatches} {accumulation} {objective:?}: {tiny}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn what_an_f16_wire_cannot_carry_is_an_error_on_all_ranks() {
    let options = options(mesh(2, 2), DType::F16, Objective::RankMean);
    let known = StepOptions::microbatches(1);
    let ended = outcomes(4, |world| one_step(world, options.clone(), known, 1, &|_, _| vec![1e6]));
    let error = common_error(ended);
    assert!(matches!(error, Error::Gradients(GradientError::NonFinite { .. })), "{error}");
}

/// The threads of one process could pass f32 around: they round to the wire all the same.
#[test]
fn contributions_are_rounded_to_the_wire() {
    let finer = 1.0 + 2f32.powi(-12);
    for mesh in [mesh(1, 2), mesh(2, 1), mesh(2, 2)] {
        for (wire, arrives) in [(DType::F32, finer), (DType::F16, 1.0), (DType::BF16, 1.0)] {
            let options = options(mesh, wire, Objective::RankMean);
            assert_eq!(reduced(&options, 1, &|_, _| vec![finer]), [arrives], "{mesh} {wire}");
        }
    }
}
