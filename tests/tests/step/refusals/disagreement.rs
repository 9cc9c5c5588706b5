//! Ranks were given different options, models, steps or values: all ranks get an error that names the difference, before any data
//! is mixed up.

use hsdp::{
    AdamW, AdamWOptions, DType, Error, ModelOptions, ModelSpec, Optimizer, Param, Precision,
    ShardedModel, StepOptions, Unit, Unused, World,
};
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common_error, mesh, outcomes};

#[test]
fn a_rank_that_never_updates_is_found_when_the_next_step_begins() {
    let error = common_error(outcomes(4, |world| {
        let rank = world.rank().index();
        let mut model = model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        springs::microbatch(&mut step, Batch::of(rank, 0, 0))?;
        let gradients = step.finish()?;
        if rank != 3 {
            adamw.step(&mut model, gradients)?;
        }
        model.begin_step(StepOptions::microbatches(1)).map(drop)
    }));
    assert!(error.is_fatal());
    let what = "the number of committed steps";
    assert_eq!(
        error.to_string(),
        format!("{what} differs between ranks: rank 3 has 0, rank 0 has 1")
    );
}

#[test]
fn ranks_that_begin_different_steps_are_named() {
    let error = common_error(outcomes(4, |world| {
        let count = if world.rank().index() == 1 { Some(3) } else { None };
        let mut model = model(world, &ModelOptions::on(mesh(2, 2)))?;
        model.begin_step(StepOptions { microbatches: count, ..StepOptions::default() }).map(drop)
    }));
    let what = "the number of microbatches of the step";
    assert_eq!(
        error.to_string(),
        format!("{what} differs between ranks: rank 1 has 3, rank 0 has as many as come")
    );
}

#[test]
fn ranks_that_plan_differently_are_named() {
    let error = common_error(outcomes(4, |world| {
        let prefetch = if world.rank().index() == 3 { 2 } else { 1 };
        model(world, &ModelOptions { prefetch, ..ModelOptions::on(mesh(2, 2)) })
    }));
    assert_eq!(error.to_string(), option_differs("rank 3 has prefetch 2, rank 0 has prefetch 1"));
}

#[test]
fn ranks_on_different_meshes_are_named() {
    let error = common_error(outcomes(4, |world| {
        let mesh = if world.rank().index() == 2 { mesh(4, 1) } else { mesh(2, 2) };
        model(world, &ModelOptions::on(mesh))
    }));
    assert_eq!(error.to_string(), option_differs("rank 2 has mesh 4x1, rank 0 has mesh 2x2"));
}

#[test]
fn ranks_with_different_options_are_named() {
    let error = common_error(outcomes(4, |world| {
        let unused = if world.rank().index() == 1 { Unused::ErrorOnAnyRank } else { Unused::Zeros };
        model(world, &ModelOptions { unused, ..ModelOptions::on(mesh(2, 2)) })
    }));
    let expected = option_differs("rank 1 has unused ErrorOnAnyRank, rank 0 has unused Zeros");
    assert_eq!(error.to_string(), expected);
}

#[test]
fn ranks_with_different_models_are_told_the_first_parameter_that_differs() {
    let error = common_error(outcomes(4, |world| {
        let rows = if world.rank().index() == 2 { 5 } else { 4 };
        let unit = Unit::new("head").param(Param::new("w", [rows, 3])).param(Param::new("b", [3]));
        let spec = ModelSpec::new().unit(unit);
        ShardedModel::new(world, spec, ModelOptions::on(mesh(2, 2)), springs::initial)
    }));
    assert_eq!(
        error.to_string(),
        "the model spec differs between ranks: rank 2 has parameter `w` [5, 3] in unit 0, \
         rank 0 has parameter `w` [4, 3] in unit 0"
    );
}

#[test]
fn ranks_that_begin_steps_of_different_models_are_told_which() {
    let error = common_error(outcomes(2, |world| {
        let rank = world.rank().index();
        let on = ModelOptions::on(mesh(1, 2));
        let one = model(world.clone(), &on)?;
        let other = model(world, &ModelOptions { prefetch: 2, ..on })?;
        let mut first = if rank == 0 { one } else { other };
        first.begin_step(StepOptions::microbatches(1)).map(drop)
    }));
    let header = "all_gather u64 9 elements";
    let step = "header, step 0, microbatch 0";
    assert_eq!(
        error.to_string(),
        format!(
            "collective mismatch: ranks disagree about operation 2 on channel control, epoch 0:\n  \
             rank 0: {header}, model 0, {step}\n  rank 1: {header}, model 1, {step}"
        )
    );
}

fn option_differs(who_has_what: &str) -> String {
    format!("an option of the model differs between ranks: {who_has_what}")
}

#[test]
fn replicas_that_start_from_different_values_are_named() {
    let error = common_error(outcomes(4, |world| {
        let rank = world.rank().index();
        ShardedModel::new(world, three_units(), ModelOptions::on(mesh(2, 2)), |param| {
            let mut values = springs::initial(param);
            let last = values.len() - 1;
            values[last] += if rank == 3 { 0.125 } else { 0.0 };
            values
        })
    }));
    let message = error.to_string();
    assert!(
        message.starts_with("the initial value of a parameter differs between ranks: rank 3 has `"),
        "{message}"
    );
    assert!(message.contains(", rank 0 has `"), "{message}");
}

/// No two of the ranks hold the same shard: the model would have parts of two.
#[test]
fn ranks_of_a_shard_group_that_start_from_different_values_are_named() {
    let error = common_error(outcomes(3, |world| {
        let rank = world.rank().index();
        ShardedModel::new(world, three_units(), ModelOptions::on(mesh(1, 3)), |param| {
            let mut values = springs::initial(param);
            values[0] += if rank == 1 && param.name == "second.bias" { 0.125 } else { 0.0 };
            values
        })
    }));
    let message = error.to_string();
    let expected = "the initial value of a parameter differs between ranks: rank 1 has \
                    `second.bias` with digest 0x";
    assert!(message.starts_with(expected), "{message}");
    assert!(message.contains(", rank 0 has `second.bias` with digest 0x"), "{message}");
}

/// Each rank may have read the setting from a file of its own.
#[test]
fn ranks_whose_models_have_other_settings_are_named() {
    let error = common_error(outcomes(4, |world| {
        let base = if world.rank().index() == 2 { 5e5 } else { 1e4 };
        let spec = three_units().setting("heads", 4).setting("rope_theta", base);
        ShardedModel::new(world, spec, ModelOptions::on(mesh(2, 2)), springs::initial)
    }));
    let expected = "the model spec differs between ranks: rank 2 has rope_theta 500000, rank 0 has \
                    rope_theta 10000";
    assert_eq!(error.to_string(), expected);
}

fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, three_units(), options.clone(), springs::initial)
}

#[test]
fn ranks_with_another_output_dtype_are_named() {
    let error = common_error(outcomes(2, |world| {
        let output = (world.rank().index() == 1).then_some(DType::BF16);
        let precision = Precision { output, ..Precision::default() };
        model(world, &ModelOptions { precision, ..ModelOptions::on(mesh(1, 2)) })
    }));
    let expected = "rank 1 has precision.output bf16, rank 0 has precision.output as it is";
    assert_eq!(error.to_string(), option_differs(expected));
}
