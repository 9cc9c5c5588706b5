//! The check of the first step: trainable parameters that got no gradient on any rank.

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{
    DType, DynamicScale, Error, GradientError, LossScaling, ModelOptions, Objective, Optimizer,
    Param, Precision, Sgd, SgdOptions, ShardedModel, StepOptions, Uneven, Unused, Update, World,
};
use hsdp_sharding::Role;
use hsdp_tests::support::models::partly_frozen;
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};
use hsdp_tests::support::{slopes, springs};

const MESHES: [(usize, usize); 3] = [(1, 1), (1, 2), (2, 2)];

const SPARE: &str = "second.bias";

#[test]
fn parameters_without_a_gradient_are_refused_in_the_first_step_and_training_goes_on() {
    for (replicate, shard) in MESHES {
        let told = on_ranks(replicate * shard, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world, &ModelOptions::on(mesh(replicate, shard)))?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            let before = model.full_parameters()?;
            let mut told = Vec::new();
            for _ in 0..2 {
                let refused = step(&mut model, &mut sgd, |param| match &*param.name {
                    SPARE | "third.weight" => None,
                    // Another rank has it, if there is one.
                    "first.weight" if rank > 0 => None,
                    _ => Some(1.0),
                });
                told.push(refused.expect_err("two have no gradient").to_string());
            }
            assert_eq!(model.full_parameters()?, before);
            assert_eq!((model.committed_steps(), model.applied_steps()), (0, 0));
            step(&mut model, &mut sgd, all)?;
            assert_ne!(model.full_parameters()?[SPARE], before[SPARE]);
            // The check is over.
            step(&mut model, &mut sgd, without_the_spare)?;
            assert_eq!((model.committed_steps(), model.applied_steps()), (2, 2));
            Ok(told)
        });
        let text = |step| {
            format!(
                "step {step}: 2 of 6 trainable parameters got no gradient on any rank: \
                 second.bias, third.weight. Either an operation without a backward or a detach cuts \
                 the graph between them and the loss, or the loss does not depend on them, or they \
                 are buffers (running statistics, say) that are declared as parameters. If they \
                 need no gradient, freeze them, or choose Unused::Warn or Unused::Zeros"
            )
        };
        assert_eq!(common(told), [text(0), text(1)], "{replicate}x{shard}");
    }
}

#[test]
fn the_error_names_all_trainable_parameters_and_no_frozen_one() {
    let error = common_error(outcomes(4, |world| {
        let mut model = springs::model_of(world, &partly_frozen(), &ModelOptions::on(mesh(2, 2)))?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        step(&mut model, &mut sgd, |_| None)
    }));
    assert!(!error.is_fatal());
    let Error::Gradients(GradientError::WithoutGradient {
        step: 0,
        trainable: 3,
        parameters,
        causes,
    }) = error
    else {
        panic!("{error}")
    };
    let spec = partly_frozen();
    let expected = spec.params().filter(|(_, param)| param.role == Role::Trainable);
    let expected: Vec<_> = expected.map(|(_, param)| param.name.clone()).collect();
    assert_eq!((parameters, &*causes), (expected, ""));
}

#[test]
fn one_microbatch_of_one_rank_is_enough() {
    let updates = on_ranks(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let mut begun = model.begin_step(StepOptions::microbatches(3))?;
        for microbatch in 0..3 {
            let here = (rank, microbatch) == (3, 1);
            slopes::microbatch_by(&mut begun, &|param| {
                (here || param.name != SPARE).then_some(1.0)
            })?;
        }
        let gradients = begun.finish()?;
        sgd.step(&mut model, gradients)
    });
    assert_eq!(common(updates), Update::Applied);
}

/// A skipped step has gradients of an overflow, and is no first step.
#[test]
fn a_step_that_is_skipped_for_overflow_does_not_count() {
    let told = on_ranks(2, |world| {
        let rank = world.rank().index();
        let scale = DynamicScale { initial: 65536.0, ..DynamicScale::default() };
        let options = ModelOptions {
            precision: Precision { wire: DType::F16, ..Precision::default() },
            loss_scaling: LossScaling::Dynamic(scale),
            ..ModelOptions::on(mesh(1, 2))
        };
        let mut model = springs::model(world, &options)?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        // Half of 6 times the scale does not fit f16 until it has been halved twice.
        let slope = if rank == 1 { 6.0 } else { 0.0 };
        let mut steps = Vec::new();
        for usage in [without_the_spare, all, without_the_spare, all, without_the_spare] {
            let update = step(&mut model, &mut sgd, |param| usage(param).map(|_| slope));
            steps.push(match update {
                Ok(update) => format!("{update:?}"),
                Err(Error::Gradients(GradientError::WithoutGradient { parameters, .. })) => {
                    parameters.join(", ")
                }
                Err(error) => return Err(error),
            });
        }
        Ok((steps, model.loss_scale()))
    });
    let (steps, scale) = common(told);
    assert!(steps[0].starts_with("Skipped") && steps[1].starts_with("Skipped"), "{steps:?}");
    assert_eq!(
        (&steps[2..], scale),
        (&[SPARE, "Applied", "Applied"].map(String::from)[..], 16384.0)
    );
}

const APPLIED_WHEN_EMPTY: [Objective; 3] =
    [Objective::Sum, Objective::Factor(2.0), Objective::RankMean];

/// A step without data is applied with these objectives. It tells nothing about the parameters.
fn after_a_step_without_data(world: World, options: ModelOptions) -> Result<Update, Error> {
    let mut model = springs::model(world, &options)?;
    let mut sgd = Sgd::new(&model, SgdOptions::default());
    let mut empty = model.begin_step(StepOptions::microbatches(1))?;
    empty.microbatch()?.finish()?;
    let gradients = empty.finish()?;
    assert_eq!(sgd.step(&mut model, gradients)?, Update::Applied);
    step(&mut model, &mut sgd, without_the_spare)
}

#[test]
fn a_step_without_data_does_not_count() {
    for objective in APPLIED_WHEN_EMPTY {
        let options = ModelOptions { objective, ..ModelOptions::on(mesh(1, 2)) };
        let run = |world| after_a_step_without_data(world, options.clone());
        let Error::Gradients(GradientError::WithoutGradient { step: 1, parameters, .. }) =
            common_error(outcomes(2, run))
        else {
            panic!("{objective:?}")
        };
        assert_eq!(parameters, [SPARE], "{objective:?}");
    }
}

#[test]
fn a_step_without_data_takes_no_warning() {
    for objective in APPLIED_WHEN_EMPTY {
        let unused = Unused::Warn;
        let options = ModelOptions { objective, unused, ..ModelOptions::on(mesh(1, 1)) };
        let said = Said::default();
        let warnings = on_ranks(1, |world| {
            let run = || after_a_step_without_data(world, options.clone());
            tracing::subscriber::with_default(said.clone(), run)?;
            Ok(said.warnings().into_iter().map(|(text, _)| text).collect::<Vec<_>>())
        });
        let [text] = &warnings[0][..] else { panic!("{objective:?}: {warnings:?}") };
        assert!(text.contains(&format!("and are not updated: {SPARE} ")), "{text}");
    }
}

/// Ranks without data have no gradients, and need none.
#[test]
fn ranks_without_data_leave_the_check_to_the_others() {
    for usage in [all, without_the_spare] {
        let ends = outcomes(2, |world| {
            let rank = world.rank().index();
            let options =
                ModelOptions { uneven: Uneven::ZeroWeight, ..ModelOptions::on(mesh(1, 2)) };
            let mut model = springs::model(world, &options)?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            let options = StepOptions::microbatches(1);
            let options = if rank == 0 { options.without_data() } else { options };
            let mut begun = model.begin_step(options)?;
            if rank == 1 {
                slopes::microbatch_by(&mut begun, &usage)?;
            }
            let gradients = begun.finish()?;
            sgd.step(&mut model, gradients)
        });
        let names = ends.into_iter().map(|end| match end {
            Ok(Update::Applied) => Ok(Vec::new()),
            Err(Error::Gradients(GradientError::WithoutGradient { parameters, .. })) => {
                Ok(parameters)
            }
            other => Err(format!("{other:?}")),
        });
        let expected: &[&str] =
            if usage(&Param::new(SPARE, [1])).is_some() { &[] } else { &[SPARE] };
        assert_eq!(common(names.collect()).expect("an update, or the error"), expected);
    }
}

#[test]
fn the_first_step_after_a_resume_warns() {
    let folder = tempfile::tempdir().expect("a folder");
    let on = || ModelOptions::on(mesh(1, 2));
    on_ranks(2, |world| {
        let mut model = springs::model(world, &on())?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let mut checkpoints =
            Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
        step(&mut model, &mut sgd, all)?;
        checkpoints.save(&model, &sgd, &serde_json::Value::Null)?;
        step(&mut model, &mut sgd, without_the_spare)
    });
    let said = Said::default();
    on_ranks(2, |world| {
        let run = || {
            let mut model = springs::model(world, &on())?;
            let mut sgd = Sgd::new(&model, SgdOptions::default());
            let mut checkpoints =
                Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
            assert!(checkpoints.load_latest(&mut model, &mut sgd)?.is_some());
            step(&mut model, &mut sgd, without_the_spare)?;
            step(&mut model, &mut sgd, without_the_spare)
        };
        tracing::subscriber::with_default(said.clone(), run)
    });
    let texts: Vec<_> = said.warnings().into_iter().map(|(text, _)| text).collect();
    let [text] = &texts[..] else { panic!("{texts:?}") };
    let expected = "1 of 6 trainable parameters got no gradient on any rank, and are not updated: \
                    second.bias";
    assert!(text.contains(expected), "{text}");
}

/// An expert that gets no token in the first step, and some in the second.
#[test]
fn an_expert_without_tokens_passes_by_choice_and_is_trained_later() {
    let expert = |param: &Param| param.name.starts_with("second");
    for (replicate, shard) in MESHES {
        for unused in [Unused::Warn, Unused::Zeros] {
            let moved = on_ranks(replicate * shard, |world| {
                let options = ModelOptions { unused, ..ModelOptions::on(mesh(replicate, shard)) };
                let mut model = springs::model(world, &options)?;
                let mut sgd = Sgd::new(&model, SgdOptions::default());
                let before = model.full_parameters()?;
                step(&mut model, &mut sgd, |param| (!expert(param)).then_some(1.0))?;
                let first = model.full_parameters()?;
                step(&mut model, &mut sgd, all)?;
                let second = model.full_parameters()?;
                let has_moved = |name| [before[name] != first[name], first[name] != second[name]];
                Ok([SPARE, "third.bias"].map(has_moved))
            });
            assert_eq!(common(moved), [[false, true], [true, true]], "{unused:?}");
        }
    }
}

fn all(_: &Param) -> Option<f32> {
    Some(0.5)
}

fn without_the_spare(param: &Param) -> Option<f32> {
    (param.name != SPARE).then_some(0.5)
}

fn step(
    model: &mut ShardedModel,
    sgd: &mut Sgd,
    usage: impl Fn(&Param) -> Option<f32>,
) -> Result<Update, Error> {
    let mut begun = model.begin_step(StepOptions::microbatches(1))?;
    slopes::microbatch_by(&mut begun, &usage)?;
    let gradients = begun.finish()?;
    sgd.step(model, gradients)
}
