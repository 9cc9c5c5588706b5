//! Gradients that are not finite: what a device notes and is read when the step ends says the same
//! as the host.

use hsdp::{
    Accumulation, DType, DynamicScale, Error, LossScaling, ModelOptions, Objective, Optimizer,
    Param, Precision, Sgd, SgdOptions, ShardedModel, StepOptions, Update,
};
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, on_ranks, outcomes};

use super::{DEVICE, PLACES, placed};

/// By microbatch, rank and parameter.
type Slope = fn(usize, usize, &str) -> f32;

/// The error of a step of three microbatches, which all ranks get.
fn told(options: &ModelOptions, microbatches: Option<usize>, slope: Slope) -> String {
    let error = common_error(outcomes(options.mesh.world_size(), |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, options)?;
        let mut step = model.begin_step(StepOptions { microbatches, ..StepOptions::default() })?;
        for microbatch in 0..3 {
            let slope = |param: &Param| Some(slope(microbatch, rank, &param.name));
            slopes::microbatch_by(&mut step, &slope)?;
        }
        step.finish().map(drop)
    }));
    assert!(!error.is_fatal(), "{error}");
    error.to_string()
}

/// Two ranks have one in the same microbatch, and one has another later.
fn some_are_nan(microbatch: usize, rank: usize, name: &str) -> f32 {
    match (microbatch, rank, name) {
        (1, 3, "second.weight") | (1, 1, "third.bias") => f32::NAN,
        (2, 0, "first.weight") => f32::INFINITY,
        _ => 0.5,
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_first_that_is_not_finite_is_told_as_on_the_host() {
    for accumulation in Accumulation::ALL {
        for (mesh, microbatches) in
            [([1, 4], Some(3)), ([4, 1], None), ([2, 2], Some(3)), ([2, 2], None)]
        {
            let [on_host, on_device] = PLACES.map(|placement| {
                let options = ModelOptions { accumulation, ..placed(placement, mesh) };
                told(&options, microbatches, some_are_nan)
            });
            let expected =
                "step 0: the gradient of second.weight on rank 3 in microbatch 1 is not finite";
            assert_eq!(on_host, expected, "{accumulation}, {mesh:?}");
            assert_eq!(on_device, expected, "{accumulation}, {mesh:?}");
        }
    }
}

/// Each gradient is finite. What is not is their sum, over shards, over replicas or over
/// microbatches, or what they become on the wire.
#[test]
#[ignore = "needs a CUDA device"]
fn sums_and_roundings_that_overflow_are_told_as_on_the_host() {
    let wires = [
        (DType::F32, (|_, _, _| 2e38) as Slope),
        (DType::F16, |_, rank, _| if rank == 2 { 1e7 } else { 0.5 }),
    ];
    for accumulation in Accumulation::ALL {
        for mesh in [[1, 4], [4, 1], [2, 2]] {
            for (wire, slope) in wires {
                let [on_host, on_device] = PLACES.map(|placement| {
                    let options = ModelOptions {
                        accumulation,
                        precision: Precision { wire, ..Precision::default() },
                        objective: Objective::Sum,
                        ..placed(placement, mesh)
                    };
                    told(&options, Some(3), slope)
                });
                assert_eq!(on_device, on_host, "{accumulation}, {mesh:?}, {wire}");
            }
        }
    }
}

/// The scale of each step, whether the step was applied, and all parameters after it.
fn scaled(options: &ModelOptions, begin: StepOptions) -> Vec<(f64, bool, Vec<u32>)> {
    common(on_ranks(options.mesh.world_size(), |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let mut told = Vec::new();
        for _ in 0..4 {
            // 4 times the scale does not fit f16 until it has been halved twice.
            let update = update(&mut model, &mut sgd, begin, if rank == 3 { 4.0 } else { 0.25 })?;
            let all = model.full_parameters()?.into_values().flatten();
            let bits = all.map(f32::to_bits).collect();
            told.push((model.loss_scale(), update == Update::Applied, bits));
        }
        Ok(told)
    }))
}

fn update(
    model: &mut ShardedModel,
    sgd: &mut Sgd,
    begin: StepOptions,
    slope: f32,
) -> Result<Update, Error> {
    let mut step = model.begin_step(begin)?;
    slopes::microbatch(&mut step, slope)?;
    let gradients = step.finish()?;
    sgd.step(model, gradients)
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all() {
    let dynamic = DynamicScale { initial: 65536.0, ..DynamicScale::default() };
    for accumulation in Accumulation::ALL {
        for begin in [StepOptions::microbatches(1), StepOptions::as_many_as_come()] {
            let of = |placement| ModelOptions {
                accumulation,
                precision: Precision { wire: DType::F16, ..Precision::default() },
                loss_scaling: LossScaling::Dynamic(dynamic),
                ..placed(placement, [2, 2])
            };
            let [on_host, on_device] = PLACES.map(|placement| scaled(&of(placement), begin));
            let course: Vec<_> =
                on_device.iter().map(|(scale, applied, _)| (*scale, *applied)).collect();
            let expected = [(32768.0, false), (16384.0, false), (16384.0, true), (16384.0, true)];
            assert_eq!(course, expected, "{accumulation}, {begin:?}");
            assert!(on_device == on_host, "bits of parameters: {accumulation}, {begin:?}");
        }
    }
}

/// What was noted in a step that was refused is not told again in the next.
#[test]
#[ignore = "needs a CUDA device"]
fn a_step_goes_on_after_a_gradient_that_was_refused() {
    for accumulation in Accumulation::ALL {
        let options = ModelOptions { accumulation, ..placed(DEVICE, [2, 2]) };
        let trained = common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world, &options)?;
            let mut sgd =
                Sgd::new(&model, SgdOptions { learning_rate: 1.0, ..SgdOptions::default() });
            let once = StepOptions::microbatches(1);
            let bad = if rank == 2 { f32::NAN } else { 0.5 };
            update(&mut model, &mut sgd, once, bad).expect_err("it is not finite");
            update(&mut model, &mut sgd, once, 0.5)?;
            model.full_parameters()
        }));
        for (_, param) in three_units().params() {
            let expected: Vec<f32> = springs::initial(param).iter().map(|it| it - 0.5).collect();
            assert_eq!(trained[&param.name], expected, "{}, {accumulation}", param.name);
        }
    }
}
