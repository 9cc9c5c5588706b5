//! What is refused: on all ranks alike, with all that is wrong, and nothing changed.

use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints, Content};
use hsdp::{
    AdamW, AdamWOptions, Error, Lion, LionOptions, ModelOptions, ModelSpec, Optimizer as _, Param,
    Sgd, SgdOptions, ShardedModel, StepOptions, Unit, WholeParameters, World,
};
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};
use serde_json::json;

use super::training::Training;

fn options() -> ModelOptions {
    ModelOptions::on(mesh(1, 2))
}

#[test]
fn row_42_each_kind_of_difference_between_models_is_listed_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let spec = |params: [Param; 3]| {
        let [first, second, third] = params;
        ModelSpec::new().unit(Unit::new("unit").param(first).param(second).param(third))
    };
    let saved = || spec([Param::new("a", [4]), Param::new("b", [2, 3]), Param::new("c", [7])]);
    let other = || spec([Param::new("a", [4]), Param::new("b", [3, 2]), Param::new("d", [7])]);
    on_ranks(2, |world| {
        let mut model = ShardedModel::new(world, saved(), options(), springs::initial)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let gradients = slopes::gradients(&mut model, 1.0)?;
        adamw.step(&mut model, gradients)?;
        let options = CheckpointOptions::default();
        Checkpoints::open(&model, folder.path(), options)?.save(&model, &adamw, &json!(null))
    });
    let error = common_error(outcomes(2, |world| {
        let mut model = ShardedModel::new(world, other(), options(), springs::initial)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let before = model.full_parameters()?;
        let options = CheckpointOptions::default();
        let mut checkpoints = Checkpoints::open(&model, folder.path(), options)?;
        let loaded = checkpoints.load_latest(&mut model, &mut adamw);
        assert_eq!(model.full_parameters()?, before);
        loaded
    }));
    let path = folder.path().display();
    let wrong = "the number of updates of `d` is missing; `b` has shape [2, 3], not [3, 2]; `optimizer:exp_avg:b` has shape [2, 3], not [3, 2]; \
                 `optimizer:exp_avg_sq:b` has shape [2, 3], not [3, 2]; `d` is missing; \
                 `optimizer:exp_avg:d` is missing; `optimizer:exp_avg_sq:d` is missing; \
                 `c` is a parameter that this model does not have; `optimizer:exp_avg:c` is state that this model does not have; \
                 `optimizer:exp_avg_sq:c` is state that this model does not have";
    assert_eq!(
        error.to_string(),
        format!("loading at step 1, on rank 0: {path}/step-00000001 is of another model: {wrong}")
    );
}

/// As where a run with adapters is resumed with others.
#[test]
fn of_many_differences_the_first_are_named_and_the_others_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let spec = |name: &str, frozen: usize| {
        let adapters = (0..100).map(|layer| Param::new(format!("{name}.{layer:02}"), [4]));
        let unit = adapters.fold(Unit::new("adapters"), Unit::param);
        let base = (0..frozen).map(|layer| Param::new(format!("base.{layer:02}"), [4]).frozen());
        ModelSpec::new().unit(base.fold(unit, Unit::param))
    };
    let save = |world| {
        let mut model = ShardedModel::new(world, spec("q", 0), options(), springs::initial)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let gradients = slopes::gradients(&mut model, 1.0)?;
        adamw.step(&mut model, gradients)?;
        let options =
            CheckpointOptions { content: Content::Trainable, ..CheckpointOptions::default() };
        Checkpoints::open(&model, folder.path(), options)?.save(&model, &adamw, &json!(null))
    };
    on_ranks(2, save);
    let refused = |name: &str, frozen: usize| {
        let error = common_error(outcomes(2, |world| {
            let spec = spec(name, frozen);
            let mut model = ShardedModel::new(world, spec, options(), springs::initial)?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            let options = CheckpointOptions::default();
            let mut checkpoints = Checkpoints::open(&model, folder.path(), options)?;
            checkpoints.load_latest(&mut model, &mut adamw)
        }));
        error.to_string()
    };
    let told = refused("v", 0);
    let expected = "is of another model: \
                    `v.00` is missing; `v.01` is missing; `v.02` is missing; and 97 more; \
                    `q.00` is a parameter that this model does not have; \
                    `q.01` is a parameter that this model does not have; \
                    `q.02` is a parameter that this model does not have; and 297 more";
    assert!(told.ends_with(expected), "{told}");
    let told = refused("q", 100);
    let expected = "lacks the frozen ones: `base.00`, `base.01`, `base.02`, and 97 more; give";
    assert!(told.contains(expected), "{told}");
}

#[test]
fn a_checkpoint_of_another_optimizer_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let training = Training::new(world, &options())?;
        training.save(&mut training.checkpoints(folder.path())?)
    });
    let error = common_error(outcomes(2, |world| {
        let sgd = |model: &ShardedModel| Sgd::new(model, SgdOptions::default());
        Training::by(world, &options(), sgd)?.load_latest(folder.path())
    }));
    let told = error.to_string();
    assert!(told.ends_with("is of another model: its optimizer is adamw, not sgd"), "{told}");
}

#[test]
fn row_40_a_second_job_is_refused_on_all_its_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let training = Training::new(world, &options())?;
        let holder = "job 17".to_owned();
        let first = CheckpointOptions { holder, ..CheckpointOptions::default() };
        let mut held = Checkpoints::open(&training.model, folder.path(), first)?;
        training.save(&mut held)?;
        let refused = training.checkpoints(folder.path()).expect_err("the first has it");
        let told = refused.to_string();
        assert!(told.contains("is being written to by job 17"), "{told}");
        drop(held);
        training.checkpoints(folder.path()).map(drop)
    });
}

#[test]
fn ranks_that_would_save_different_things_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let refusals = on_ranks(2, |world| {
        let rank = world.rank().index();
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        let model = &training.model;
        let optimizer = &training.optimizer;
        let refused = checkpoints.save(model, optimizer, &json!({ "cursor": rank }));
        assert_eq!(checkpoints.store().steps().expect("listed"), [0_u64; 0]);
        training.train(1)?;
        training.save(&mut checkpoints)?;
        Ok(refused.expect_err("they differ").to_string())
    });
    let told = common(refusals);
    let expected = "saving at step 0, on rank 1: the value `user` is not the same as on rank 0";
    assert_eq!(told, expected);
}

#[test]
fn ranks_whose_optimizers_differ_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let refusals = on_ranks(2, |world| {
        let rank = world.rank().index();
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        training.optimizer.set_learning_rate(if rank == 1 { 0.5 } else { 0.25 });
        let refused = training.save(&mut checkpoints);
        training.optimizer.set_learning_rate(0.25);
        training.save(&mut checkpoints)?;
        Ok(refused.expect_err("they differ").to_string())
    });
    let expected =
        "saving at step 0, on rank 1: the options of its optimizer are not the same as on rank 0";
    assert_eq!(common(refusals), expected);
}

#[test]
fn within_a_step_nothing_is_saved_or_loaded() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        training.save(&mut checkpoints)?;
        let mut step = training.model.begin_step(StepOptions::default())?;
        springs::microbatch(&mut step, springs::Batch::of(0, 0, 0))?;
        let pending = step.finish()?;
        let saved = training.save(&mut checkpoints).map(drop);
        let loaded = checkpoints.load_latest(&mut training.model, &mut training.optimizer);
        for refused in [saved, loaded.map(drop)] {
            let told = refused.expect_err("its gradients are there").to_string();
            let expected = "a step is under way, or its gradients still exist: first apply the gradients with an optimizer, or drop them";
            assert!(told.ends_with(expected), "{told}");
        }
        drop(pending);
        checkpoints.load_latest(&mut training.model, &mut training.optimizer)?;
        training.train(1)?;
        training.save(&mut checkpoints)?;
        Ok::<_, Error>(())
    });
}

#[test]
fn a_step_whose_gradients_are_dropped_is_no_obstacle() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let mut training = Training::new(world, &options())?;
        let mut checkpoints = training.checkpoints(folder.path())?;
        let mut step = training.model.begin_step(StepOptions::default())?;
        springs::microbatch(&mut step, springs::Batch::of(0, 0, 0))?;
        drop(step.finish()?);
        assert_eq!(training.save(&mut checkpoints)?.step, 0);
        training.train(1)?;
        assert_eq!(training.save(&mut checkpoints)?.step, 1);
        Ok(())
    });
}

#[test]
fn an_optimizer_of_another_model_is_not_saved() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let [student, teacher] = [&world, &world].map(|it| Training::new(it.clone(), &options()));
        let student = student?;
        let teacher = teacher?;
        let mut checkpoints = student.checkpoints(folder.path())?;
        let refused = checkpoints.save(&student.model, &teacher.optimizer, &json!(null));
        let told = refused.expect_err("the student's model").to_string();
        assert!(told.ends_with("the optimizer was made for another model"), "{told}");
        Ok(())
    });
}

/// A model that two optimizers update, and the error of a save of what `saved` makes of them.
fn refused_of<O: Checkpointed>(
    world: World,
    folder: &Path,
    saved: impl FnOnce(&ShardedModel, AdamW, Lion) -> O,
) -> Result<String, Error> {
    let unit = Unit::new("unit").param(Param::new("w", [4, 3])).param(Param::new("b", [4]));
    let spec = ModelSpec::new().unit(unit);
    let mut model = ShardedModel::new(world, spec, options(), springs::initial)?;
    let mut adamw = AdamW::new(&model, AdamWOptions::default());
    let mut lion = Lion::new(&model, LionOptions::default());
    let gradients = slopes::gradients(&mut model, 1.0)?;
    model.update_by(
        gradients,
        [(&mut adamw, &|param| param.name == "w"), (&mut lion, &|param| param.name == "b")],
    )?;
    let optimizer = saved(&model, adamw, lion);
    let mut checkpoints = Checkpoints::open(&model, folder, CheckpointOptions::default())?;
    let refused = checkpoints.save(&model, &optimizer, &json!(null));
    Ok(refused.expect_err("it is refused").to_string())
}

/// A load would miss the state of the other parameters, or could not tell whose state a tensor is.
#[test]
fn state_that_could_not_be_loaded_is_not_saved() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = on_ranks(2, |world| {
        let alone = world.clone();
        let named = world;
        let of_one = refused_of(alone, folder.path(), |_, adamw, _| adamw)?;
        let of_two = refused_of(named, folder.path(), |model, adamw, _| {
            (adamw, WholeParameters::new(model, "exp_avg", |_| 1))
        })?;
        Ok([of_one, of_two])
    });
    let [of_one, of_two] = &told[0];
    let problem = "adamw has updated 1 of 2 trainable parameters: a checkpoint needs all optimizers of the update, as a pair";
    assert_eq!(*of_one, format!("saving on rank 0, step 1: {problem}"));
    let problem = "state of kind `exp_avg`: a checkpoint needs a name of letters, digits and `_` that no other optimizer of the update has";
    assert_eq!(*of_two, format!("saving on rank 0, step 1: {problem}"));
}

#[test]
fn a_parameter_that_has_the_name_of_a_state_is_refused_before_anything_is_trained() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["optimizer:exp_avg:w", "__metadata__"] {
        let spec = || ModelSpec::new().unit(Unit::new("unit").param(Param::new(name, [4])));
        let error = common_error(outcomes(2, |world| {
            let model = ShardedModel::new(world, spec(), options(), springs::initial)?;
            Checkpoints::open(&model, folder.path(), CheckpointOptions::default()).map(drop)
        }));
        assert!(error.to_string().starts_with(&format!("parameter `{name}`: ")), "{error}");
    }
}
