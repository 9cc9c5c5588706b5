//! Gradients that are not finite: dynamic loss scaling, skipped steps, refused steps. The same on
//! all ranks.

use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType, DynamicScale, Error, LossScaling, LossSum,
    ModelOptions, NonFinite, NonFiniteGradient, Objective, Optimizer, Origin, Param, Precision,
    Rank, Sgd, SgdOptions, ShardedModel, StepOptions, Update, Values, Verdict,
};
use hsdp_comm::{Channel, Op};
use hsdp_tests::support::handmade::{self, Handmade};
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};

#[test]
fn an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all() {
    let told = common(on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &scaled(65536.0, 2000))?;
        let mut sgd = Sgd::new(&model, SgdOptions { learning_rate: 1.0, ..SgdOptions::default() });
        let mut told = Vec::new();
        for _ in 0..4 {
            // 4 times the scale does not fit f16 until it has been halved twice.
            let slope = if rank == 3 { 4.0 } else { 0.0 };
            let before = model.full_parameters()?;
            let update = update(&mut model, &mut sgd, slope)?;
            let moved = model.full_parameters()? != before;
            told.push((model.loss_scale(), update == Update::Applied, moved));
        }
        Ok(told)
    }));
    let recovered = (16384.0, true, true);
    assert_eq!(told, [(32768.0, false, false), (16384.0, false, false), recovered, recovered]);
}

#[test]
fn a_skipped_step_leaves_no_trace_in_the_optimizer() {
    let trained = |slopes: &'static [f32]| {
        common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world, &scaled(65536.0, 2000))?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            for slope in slopes {
                update(&mut model, &mut adamw, if rank == 1 { *slope } else { 0.0 })?;
            }
            model.full_parameters()
        }))
    };
    assert_eq!(trained(&[f32::INFINITY, 0.25, f32::NAN, 0.5]), trained(&[0.25, 0.5]));
}

#[test]
fn a_scale_grows_after_its_interval_without_overflow() {
    let scales = common(on_ranks(4, |world| {
        let mut model = springs::model(world, &scaled(8.0, 2))?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let mut scales = Vec::new();
        for slope in [1.0, 1.0, 1.0, f32::INFINITY, 1.0, 1.0] {
            update(&mut model, &mut sgd, slope)?;
            scales.push(model.loss_scale());
        }
        Ok(scales)
    }));
    assert_eq!(scales, [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]);
}

#[test]
fn a_scaled_loss_gives_the_gradient_of_the_loss() {
    let gradient = |options: ModelOptions| {
        common(on_ranks(4, |world| {
            let mut model = springs::model(world, &options)?;
            springs::gradients(&mut model, 1)?.full(&model)
        }))
    };
    let unscaled = ModelOptions { loss_scaling: LossScaling::Off, ..scaled(1.0, 1) };
    assert_eq!(gradient(scaled(1024.0, 1)), gradient(unscaled));
}

/// In `third`, two shards of 64 elements: the bias lies in the second, which ranks 1 and 3 hold.
/// Rank 2, whose gradient it is, holds the first.
#[test]
fn a_gradient_that_is_not_finite_is_refused_by_name_on_all_ranks() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = common_error(outcomes(4, |world| {
            let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            update_with(&mut model, &mut sgd, StepOptions::microbatches(2), bad_on_rank_2(bad))
        }));
        assert_eq!(
            error.to_string(),
            "step 0: the gradient of third.bias on rank 2 in microbatch 0 is not finite"
        );
        assert!(!error.is_fatal());
    }
}

#[test]
fn a_step_goes_on_after_a_gradient_that_was_refused() {
    let trained = common(on_ranks(4, |world| {
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut sgd = Sgd::new(&model, SgdOptions { learning_rate: 1.0, ..SgdOptions::default() });
        let once = StepOptions::microbatches(1);
        update_with(&mut model, &mut sgd, once, bad_on_rank_2(f32::NAN))
            .expect_err("it is not finite");
        assert_eq!(model.full_parameters()?["third.bias"], initial("third.bias"));
        update(&mut model, &mut sgd, 0.5)?;
        model.full_parameters()
    }));
    let expected: Vec<f32> = initial("third.bias").into_iter().map(|value| value - 0.5).collect();
    assert_eq!(trained["third.bias"], expected);
}

#[test]
fn a_gradient_that_is_not_finite_can_be_skipped() {
    let options = ModelOptions { non_finite: NonFinite::Skip, ..ModelOptions::on(mesh(2, 2)) };
    let skips = on_ranks(4, |world| {
        let mut model = springs::model(world, &options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        update_with(&mut model, &mut sgd, StepOptions::microbatches(1), bad_on_rank_2(f32::NAN))
    });
    let Update::Skipped(found) = common(skips) else { panic!("it was applied") };
    let origin =
        Origin::Gradient { parameter: "third.bias".to_owned(), rank: Rank::new(2), microbatch: 0 };
    assert_eq!(found, NonFiniteGradient { step: 0, origin });
}

/// A loss that is NaN though every gradient is finite: a model that is drawn to a constant, say,
/// and logs a broken number. A loss that is NaN, with this gradient.
struct BrokenLoss(f32);

impl Handmade for BrokenLoss {
    fn forward(&mut self, _: &Param, _: Values<'_>) {}

    fn loss(&self) -> LossSum {
        LossSum::new(f64::NAN, 1)
    }

    fn derivative(&self, _: &Param, values: Values<'_>) -> Option<Vec<f32>> {
        Some(vec![self.0; values.len()])
    }
}

#[test]
fn a_loss_that_is_not_finite_is_told_whether_gradients_are_or_not() {
    for gradient in [0.5, f32::NAN] {
        a_loss_with_this_gradient(gradient);
    }
}

fn a_loss_with_this_gradient(gradient: f32) {
    let told = |non_finite| {
        let options = ModelOptions { non_finite, ..ModelOptions::on(mesh(2, 2)) };
        outcomes(4, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world, &options)?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            let mut step = model.begin_step(StepOptions::microbatches(2))?;
            slopes::microbatch(&mut step, 0.5)?;
            match rank {
                2 => handmade::microbatch(&mut step, &mut BrokenLoss(gradient))?,
                _ => slopes::microbatch(&mut step, 0.5)?,
            }
            let gradients = step.finish()?;
            let update = sgd.step(&mut model, gradients)?;
            assert_eq!(model.full_parameters()?["third.bias"], initial("third.bias"));
            Ok(update)
        })
    };
    let error = common_error(told(NonFinite::Abort)).to_string();
    assert_eq!(error, "step 0: the loss of rank 2 is not finite");
    let skipped = told(NonFinite::Skip).into_iter().map(|update| update.expect("skipped"));
    let found = NonFiniteGradient { step: 0, origin: Origin::Loss { rank: Rank::new(2) } };
    assert_eq!(common(skipped.collect()), Update::Skipped(found));
}

/// Several are bad: that of the earliest microbatch is told, there the first parameter of the
/// model, on its first rank.
#[test]
fn the_first_of_several_is_told_in_every_mode_on_every_mesh() {
    for accumulation in Accumulation::ALL {
        for (replicate, shard) in [(1, 4), (4, 1), (2, 2)] {
            for microbatches in [Some(3), None] {
                let options =
                    ModelOptions { accumulation, ..ModelOptions::on(mesh(replicate, shard)) };
                let error = common_error(outcomes(4, |world| {
                    let rank = world.rank().index();
                    let mut model = springs::model(world, &options)?;
                    let begin = StepOptions { microbatches, ..StepOptions::default() };
                    let mut step = model.begin_step(begin)?;
                    for microbatch in 0..3 {
                        let bad = |name: &str| {
                            matches!(
                                (microbatch, rank, name),
                                (1, 3, "second.weight")
                                    | (1, 1, "third.bias")
                                    | (2, 0, "first.weight")
                            )
                        };
                        let slope = |param: &Param| {
                            Some(if bad(&param.name) { f32::INFINITY } else { 0.5 })
                        };
                        slopes::microbatch_by(&mut step, &slope)?;
                    }
                    step.finish().map(drop)
                }));
                assert_eq!(
                    error.to_string(),
                    "step 0: the gradient of second.weight on rank 3 in microbatch 1 is not finite",
                    "{options:?}"
                );
            }
        }
    }
}

#[test]
fn a_sum_that_overflows_is_nobodys_gradient() {
    let told_of = |options: &ModelOptions, slope: fn(&Param) -> f32| {
        common_error(outcomes(4, |world| {
            let mut model = springs::model(world, options)?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            let slope = move |_, param: &Param| slope(param);
            update_with(&mut model, &mut sgd, StepOptions::microbatches(1), slope)
        }))
        .to_string()
    };
    let sum = |mesh| ModelOptions { objective: Objective::Sum, ..ModelOptions::on(mesh) };
    assert_eq!(
        told_of(&sum(mesh(1, 4)), |_| 2e38),
        "step 0: the sum of the gradients of first.weight is not finite after microbatch 0 on rank 0, though each of \
         them is"
    );
    assert_eq!(
        told_of(&sum(mesh(4, 1)), |_| 2e38),
        "step 0: the sum over the replicas of the gradients of first.weight is not finite on rank 0, though each of \
         them is"
    );
    // The replica whose slice has it finds it.
    assert_eq!(
        told_of(&sum(mesh(4, 1)), |param| if param.name == "third.bias" { 2e38 } else { 1.0 }),
        "step 0: the sum over the replicas of the gradients of third.bias is not finite on rank 3, though each of \
         them is"
    );
    let tiny = ModelOptions { objective: Objective::Factor(1e-30), ..ModelOptions::on(mesh(2, 2)) };
    let message = told_of(&tiny, |_| 1e20);
    assert!(message.starts_with("step 0: a gradient of norm "), "{message}");
    assert!(message.ends_with("is not finite when divided by 1e-30"), "{message}");
}

/// Four units on two replicas, in a step whose number of microbatches is not known: no all-reduce
/// is issued before `finish`, and none after it is known that a partial has overflowed.
#[test]
fn an_overflow_in_a_partial_skips_the_all_reduces_that_have_not_begun() {
    let calls = |slope: f32| {
        common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world.clone(), &scaled(4.0, 2000))?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            let slope = if rank == 3 { slope } else { 1.0 };
            let all_reduces = || world.ledger().op(Channel::AllReduce, Op::AllReduce).calls;
            let mut counted = Vec::new();
            for begin in [StepOptions::as_many_as_come(), StepOptions::microbatches(1)] {
                let before = all_reduces();
                let slope = move |_, _: &Param| slope;
                let update = update_with(&mut model, &mut sgd, begin, slope)?;
                counted.push((all_reduces() - before, update == Update::Applied));
            }
            Ok((counted, model.loss_scale()))
        }))
    };
    assert_eq!(calls(1.0), (vec![(3, true), (3, true)], 4.0));
    let (counted, scale) = calls(200_000.0);
    assert_eq!(counted[0], (0, false));
    assert!(counted[1].0 <= 3 && !counted[1].1, "{counted:?}");
    assert_eq!(scale, 1.0, "it is at its least");
}

/// The sums of the replicas differ where a step ends before its all-reduces: those of ranks 0 and 1
/// are finite.
#[test]
fn the_norm_of_a_step_that_overflows_on_one_replica_is_nan_on_all_ranks() {
    let norms = on_ranks(4, |world| {
        let slope = if world.rank().index() == 3 { 200_000.0 } else { 1.0 };
        let mut model = springs::model(world, &scaled(4.0, 2000))?;
        let mut step = model.begin_step(StepOptions::as_many_as_come())?;
        slopes::microbatch_by(&mut step, &|_| Some(slope))?;
        let gradients = step.finish()?;
        assert_ne!(gradients.verdict(), &Verdict::Apply);
        Ok(gradients.norm())
    });
    assert!(norms.iter().all(|norm| norm.is_nan()), "{norms:?}");
}

/// A model that is NaN would skip for ever, and say nothing, if a scale that cannot be halved went
/// on to be an excuse.
#[test]
fn an_overflow_at_the_least_scale_is_refused_or_skipped_as_the_options_say() {
    let told = |non_finite| {
        let options = ModelOptions { non_finite, ..scaled(2.0, 2000) };
        common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world, &options)?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            let slope = if rank == 3 { f32::NAN } else { 0.5 };
            let mut told = Vec::new();
            for _ in 0..3 {
                let update = update(&mut model, &mut sgd, slope);
                told.push((
                    update.map(|it| it != Update::Applied).unwrap_or_default(),
                    model.loss_scale(),
                ));
            }
            // The refused step has left no trace, and the scale is where it was.
            assert_eq!(update(&mut model, &mut sgd, 0.5)?, Update::Applied);
            Ok((told, model.committed_steps()))
        }))
    };
    assert_eq!(told(NonFinite::Abort), (vec![(true, 1.0), (false, 1.0), (false, 1.0)], 2));
    assert_eq!(told(NonFinite::Skip), (vec![(true, 1.0), (true, 1.0), (true, 1.0)], 4));
}

/// An f16 wire with a dynamic loss scale.
fn scaled(initial: f64, growth_interval: u64) -> ModelOptions {
    let dynamic = DynamicScale { initial, growth_interval, ..DynamicScale::default() };
    let precision = Precision { wire: DType::F16, ..Precision::default() };
    ModelOptions {
        precision,
        loss_scaling: LossScaling::Dynamic(dynamic),
        ..ModelOptions::on(mesh(2, 2))
    }
}

/// A slope of 0.5, but `bad` for one parameter on rank 2.
fn bad_on_rank_2(bad: f32) -> impl Fn(usize, &Param) -> f32 {
    move |rank, param| if rank == 2 && param.name == "third.bias" { bad } else { 0.5 }
}

fn update(
    model: &mut ShardedModel,
    optimizer: &mut dyn Optimizer,
    slope: f32,
) -> Result<Update, Error> {
    update_with(model, optimizer, StepOptions::microbatches(1), move |_, _| slope)
}

fn update_with(
    model: &mut ShardedModel,
    optimizer: &mut dyn Optimizer,
    options: StepOptions,
    slope: impl Fn(usize, &Param) -> f32,
) -> Result<Update, Error> {
    let rank = model.rank().index();
    let mut step = model.begin_step(options)?;
    for _ in 0..options.microbatches.unwrap_or(1) {
        slopes::microbatch_by(&mut step, &|param| Some(slope(rank, param)))?;
    }
    let gradients = step.finish()?;
    let applies = *gradients.verdict() == Verdict::Apply;
    let update = optimizer.step(model, gradients)?;
    assert_eq!(update == Update::Applied, applies);
    Ok(update)
}

fn initial(name: &str) -> Vec<f32> {
    let spec = three_units();
    springs::initial(&spec[spec.find(name).expect("a parameter of the model")])
}
