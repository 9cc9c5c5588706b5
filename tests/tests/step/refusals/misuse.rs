//! A rank misuses the API in a way that the types cannot forbid: it gets an error at run time, with
//! names and numbers.

use hsdp::{
    DType, Error, LossScaling, LossSum, Mesh, ModelOptions, Objective, ParamId, Pass, PassHandle,
    Precision, ShardedModel, Step, StepOptions, UnitGradients, UnitId, Unused, World,
};
use hsdp_tests::support::models::{keeping_the_second, partly_frozen, three_units, unit};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common_error, mesh, outcomes};

#[test]
fn a_handle_used_after_its_microbatch_names_both() {
    let message = in_a_step(|step| {
        let stale = finished(step)?;
        let _pass = step.microbatch()?;
        stale.unshard(unit(0)).map(drop)
    });
    assert_eq!(
        message,
        "unshard on rank 0: the handle belongs to microbatch 0 of step 0, and the model is in microbatch 1 of step 0; \
         a graph can be used in its own microbatch only"
    );
}

#[test]
fn a_handle_used_between_microbatches_is_stale() {
    let message = in_a_step(|step| {
        let stale = finished(step)?;
        stale.reduce(unit(0), UnitGradients::new().without().without())
    });
    assert!(message.contains(
        "belongs to microbatch 0 of step 0, and the model is between microbatches of step 0"
    ));
}

#[test]
fn a_handle_used_in_a_later_step_names_both_steps() {
    let mut model = model(ModelOptions::on(Mesh::SINGLE)).expect("a model");
    let mut step = begun(&mut model);
    let stale = finished(&mut step).expect("a microbatch");
    drop(step);
    let reduced = stale.reduce(unit(0), UnitGradients::new().without().without());
    let message = reduced.expect_err("it is stale").to_string();
    assert!(
        message.contains("belongs to microbatch 0 of step 0, and no step is under way"),
        "{message}"
    );

    // The step that was dropped is tried again under its number; its graphs are stale all the same.
    let mut step = begun(&mut model);
    let pass = step.microbatch().expect("a microbatch");
    let message = stale.unshard(unit(0)).expect_err("it is stale").to_string();
    assert!(
        message
            .starts_with("unshard on rank 0: the handle belongs to microbatch 0 of step 0, and "),
        "{message}"
    );
    drop(pass);
}

#[test]
fn a_gradient_of_the_wrong_size_is_named() {
    let message = in_a_backward(|pass| {
        pass.reduce(unit(0), UnitGradients::new().with(vec![0.0_f32; 90]).without())
    });
    assert_eq!(message, "reduce of first.weight on rank 0: got 90 elements, the plan has 91");
}

#[test]
fn too_few_gradients_are_counted() {
    let message =
        in_a_backward(|pass| pass.reduce(unit(0), UnitGradients::of([vec![0.0_f32; 91]])));
    assert_eq!(
        message,
        "reduce on rank 0, step 0: unit first has 2 parameters, 1 gradients were given"
    );
}

#[test]
fn a_gradient_for_a_frozen_parameter_is_refused() {
    let message = on_one_rank(&partly_frozen(), |pass| {
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        pass.reduce(unit(2), UnitGradients::new().with(vec![0.0_f32; 93]).without())
    });
    assert_eq!(
        message,
        "reduce on rank 0, step 0: parameter third.weight is frozen and was given a gradient"
    );
}

#[test]
fn a_third_unshard_in_a_microbatch_is_refused() {
    let message = in_a_backward(|pass| {
        for _ in 0..3 {
            let _ = pass.unshard(unit(1))?;
        }
        Ok(())
    });
    let expected = "unshard on rank 0, step 0: unit second has been gathered as often as the plan says for microbatch 0";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn a_second_unshard_of_a_kept_unit_is_refused() {
    let message = on_one_rank(&keeping_the_second(), |pass| {
        let _ = pass.unshard(unit(1))?;
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        pass.unshard(unit(1)).map(drop)
    });
    assert!(
        message.contains("unit second has been gathered as often as the plan says"),
        "{message}"
    );
}

#[test]
fn a_unit_that_is_reduced_twice_in_a_microbatch_is_refused() {
    let twice = |pass: &mut Pass<'_>| {
        pass.reduce(unit(1), zeros(pass, unit(1)))?;
        pass.reduce(unit(1), zeros(pass, unit(1)))
    };
    let message = in_a_backward(twice);
    assert!(message.contains("unit second") && message.contains("microbatch 0"), "{message}");
    let message = in_a_backward(|pass| {
        pass.reduce(unit(2), zeros(pass, unit(2)))?;
        twice(pass)
    });
    assert!(message.contains("unit second") && message.contains("microbatch 0"), "{message}");
}

#[test]
fn a_unit_that_is_refused_the_second_time_adds_nothing_to_the_step() {
    let options = ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(Mesh::SINGLE) };
    let mut model = model(options).expect("a model");
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    let mut pass = step.microbatch().expect("a microbatch");
    let _ = pass.loss(LossSum::new(0.0, 1)).expect("the first loss");
    let first = || UnitGradients::new().with(vec![1.0_f32; 91]);
    pass.reduce(unit(0), first().without()).expect("the first time");
    let again = pass.reduce(unit(0), first().with(vec![1.0_f32; 13]));
    let told = again.expect_err("the second time").to_string();
    assert!(told.contains("unit first was reduced in microbatch 0 before"), "{told}");
    pass.finish().expect("the microbatch");
    let gradients = step.finish().expect("the refused call has changed nothing");
    let present = [0, 1].map(|index| gradients.has_gradient(ParamId { unit: unit(0), index }));
    assert_eq!(present, [true, false]);
}

#[test]
fn a_unit_that_the_model_does_not_have_is_refused() {
    let unshard = in_a_backward(|pass| pass.unshard(unit(3)).map(drop));
    assert_eq!(unshard, "unshard on rank 0, step 0: there is no unit 3, the model has 3");
    let reduce = in_a_backward(|pass| pass.reduce(unit(7), UnitGradients::new()));
    assert_eq!(reduce, "reduce on rank 0, step 0: there is no unit 7, the model has 3");
}

#[test]
fn a_second_loss_in_a_microbatch_is_refused() {
    let message = in_a_backward(|pass| pass.loss(LossSum::new(0.0, 1)).map(drop));
    assert_eq!(message, "loss on rank 0, step 0: this microbatch has its loss already");
}

#[test]
fn gradients_that_come_before_the_loss_are_refused() {
    let message = on_one_rank(&three_units(), |pass| pass.reduce(unit(2), zeros(pass, unit(2))));
    assert!(
        message.starts_with("reduce on rank 0, step 0: gradients come before the loss"),
        "{message}"
    );
}

#[test]
fn a_backward_that_starts_before_the_loss_is_refused() {
    let message = on_one_rank(&three_units(), |pass| {
        let _ = pass.unshard(unit(0))?;
        pass.unshard(unit(0)).map(drop)
    });
    assert!(
        message.starts_with("unshard on rank 0, step 0: the backward pass begins with `loss`"),
        "{message}"
    );
}

#[test]
fn a_microbatch_too_many_is_refused() {
    let message = in_a_step(|step| {
        for _ in 0..3 {
            finished(step)?;
        }
        Ok(())
    });
    assert_eq!(
        message,
        "microbatch on rank 0, step 0: the step was begun with 2 microbatches, all are done"
    );
}

#[test]
fn a_microbatch_that_was_dropped_blocks_the_next_and_the_finish() {
    let message = in_a_step(|step| {
        drop(step.microbatch()?);
        step.microbatch().map(drop)
    });
    assert_eq!(message, "microbatch on rank 0, step 0: microbatch 0 was begun and not finished");

    let mut model = model(ModelOptions::on(Mesh::SINGLE)).expect("a model");
    let mut step = begun(&mut model);
    drop(step.microbatch().expect("a microbatch"));
    let message = step.finish().expect_err("it is open").to_string();
    assert_eq!(message, "finish on rank 0, step 0: microbatch 0 was begun and not finished");
}

#[test]
fn a_step_without_a_microbatch_is_refused() {
    let mut model = model(ModelOptions::on(Mesh::SINGLE)).expect("a model");
    let none = model.begin_step(StepOptions::microbatches(0)).expect_err("there is nothing in it");
    assert_eq!(
        none.to_string(),
        "begin_step on rank 0, step 0: a step of 0 microbatches has nothing to reduce"
    );
    let empty = model.begin_step(StepOptions::microbatches(2)).expect("two are to come").finish();
    let message = empty.expect_err("none came").to_string();
    let expected = "finish on rank 0, step 0: 0 microbatches are done, the step was begun with 2";
    assert_eq!(message, expected);
}

#[test]
fn a_step_goes_on_after_one_that_was_misused() {
    let options = ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(Mesh::SINGLE) };
    let mut model = model(options).expect("a model");
    for _ in 0..3 {
        let mut step = begun(&mut model);
        let mut pass = step.microbatch().expect("a microbatch");
        pass.unshard(unit(9)).expect_err("there is no such unit");
    }
    let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
    finished(&mut step).expect("a microbatch");
    assert_eq!(step.finish().expect("a clean step").step(), 0);
}

#[test]
fn a_step_that_was_leaked_blocks_the_next() {
    let mut model = model(ModelOptions::on(Mesh::SINGLE)).expect("a model");
    let _leaked = std::mem::ManuallyDrop::new(begun(&mut model));
    let message = model.begin_step(StepOptions::default()).expect_err("one is open").to_string();
    assert_eq!(message, "begin_step on rank 0, step 0: step 0 was neither finished nor dropped");
}

#[test]
fn weights_that_have_no_sum_are_refused() {
    let message = in_a_step(|step| {
        for _ in 0..2 {
            let mut pass = step.microbatch()?;
            let _ = pass.loss(LossSum::new(0.0, u64::MAX / 2 + 1))?;
            pass.finish()?;
        }
        Ok(())
    });
    assert!(message.ends_with("add up to 2^64 or more"), "{message}");
    let error = common_error(outcomes(2, |world| {
        let options = ModelOptions::on(mesh(2, 1));
        let mut model = springs::model(world, &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let _ = pass.loss(LossSum::new(0.0, u64::MAX / 2 + 1))?;
        pass.finish()?;
        step.finish().map(drop)
    }));
    let expected = "step 0: the weights of ranks 0, 1 add up to 2^64 or more; rank 0 has the largest \
                    weight, 9223372036854775808";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_prefetch_beyond_the_end_gathers_all() {
    let options = ModelOptions { prefetch: usize::MAX, ..ModelOptions::on(Mesh::SINGLE) };
    let mut model = model(options).expect("a model");
    let mut step = begun(&mut model);
    let mut pass = step.microbatch().expect("a microbatch");
    let full = pass.unshard(unit(0)).expect("a unit");
    assert_eq!([0, 1].map(|parameter| full.values(parameter).len()), [91, 13]);
}

#[test]
fn an_init_of_the_wrong_size_is_named() {
    let options = ModelOptions::on(Mesh::SINGLE);
    let made = ShardedModel::new(World::single(), three_units(), options, |_| vec![0.0; 91]);
    let message = made.expect_err("the bias has 13 elements").to_string();
    assert_eq!(message, "init of first.bias on rank 0: got 91 elements, the plan has 13");
}

#[test]
fn a_mesh_that_is_not_the_worlds_is_refused() {
    let error =
        common_error(outcomes(4, |world| springs::model(world, &ModelOptions::on(mesh(2, 3)))));
    assert_eq!(error.to_string(), "a mesh of 2x3 has 6 ranks, the world has 4");
}

#[test]
fn options_that_make_no_sense_are_refused_with_their_value() {
    let on = || ModelOptions::on(Mesh::SINGLE);
    let refused = |options| model(options).expect_err("it makes no sense").to_string();
    let factor = refused(ModelOptions { objective: Objective::Factor(-2.0), ..on() });
    assert_eq!(factor, "objective Factor(-2): a divide factor must be finite and above 0 in f32");
    let scale = refused(ModelOptions { loss_scaling: LossScaling::Fixed(0.0), ..on() });
    assert_eq!(scale, "loss scale 0: it must be finite and above 0 in f32");
    let dtype = refused(ModelOptions { precision: Precision::compute_in(DType::I32), ..on() });
    assert_eq!(dtype, "parameters dtype i32: gradients and parameters must be f32, bf16 or f16");
}

/// The error of something done in a step of two microbatches, on a world of one rank.
fn in_a_step(misuse: impl FnOnce(&mut Step<'_>) -> Result<(), Error>) -> String {
    let mut model = model(ModelOptions::on(Mesh::SINGLE)).expect("a model");
    let mut step = begun(&mut model);
    misuse(&mut step).expect_err("it is misuse").to_string()
}

/// The error of something done after the loss of a microbatch of three units.
fn in_a_backward(misuse: impl FnOnce(&mut Pass<'_>) -> Result<(), Error>) -> String {
    on_one_rank(&three_units(), |pass| {
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        misuse(pass)
    })
}

/// The error of something done in a microbatch.
fn on_one_rank(
    spec: &hsdp::ModelSpec,
    misuse: impl FnOnce(&mut Pass<'_>) -> Result<(), Error>,
) -> String {
    let options = ModelOptions::on(Mesh::SINGLE);
    let mut model = springs::model_of(World::single(), spec, &options).expect("a model");
    let mut step = begun(&mut model);
    let mut pass = step.microbatch().expect("a microbatch");
    misuse(&mut pass).expect_err("it is misuse").to_string()
}

fn model(options: ModelOptions) -> Result<ShardedModel, Error> {
    springs::model(World::single(), &options)
}

fn begun(model: &mut ShardedModel) -> Step<'_> {
    model.begin_step(StepOptions::microbatches(2)).expect("a step")
}

/// Runs a microbatch without any use of the model, and gives what an autograd would still hold of
/// it.
fn finished(step: &mut Step<'_>) -> Result<PassHandle, Error> {
    let mut pass = step.microbatch()?;
    let _ = pass.loss(LossSum::new(0.0, 1))?;
    let handle = pass.handle();
    pass.finish()?;
    Ok(handle)
}

fn zeros(pass: &Pass<'_>, unit: UnitId) -> UnitGradients {
    let handle = pass.handle();
    let params = &handle.plan().spec()[unit].params;
    UnitGradients::of(params.iter().map(|param| vec![0.0_f32; param.numel()]))
}
