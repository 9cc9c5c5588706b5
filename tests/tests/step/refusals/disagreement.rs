//! Ranks that were given different options, models, steps or values: all ranks get an error that
//! names the difference, before they exchange any data.

use hsdp::{
    AdamW, AdamWOptions, DType, ModelOptions, ModelSpec, Optimizer, Param, Precision, ShardedModel,
    StepOptions, Unit, Unused,
};
use hsdp_sharding::State;
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common_error, mesh, outcomes};

#[test]
fn a_rank_that_never_updates_is_found_when_the_next_step_begins() {
    let error = common_error(outcomes(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let gradients = springs::gradients(&mut model, 1)?;
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
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        model.begin_step(StepOptions { microbatches: count, ..StepOptions::default() }).map(drop)
    }));
    let what = "the number of microbatches of the step";
    assert_eq!(
        error.to_string(),
        format!("{what} differs between ranks: rank 1 has 3, rank 0 has as many as come")
    );
}

/// Returns the options of a rank.
type Options = fn(usize) -> ModelOptions;

#[test]
fn ranks_with_different_options_are_named() {
    let of_ranks: [(Options, &str); 4] = [
        (
            |rank| ModelOptions { prefetch: [1, 1, 1, 2][rank], ..ModelOptions::on(mesh(2, 2)) },
            "rank 3 has prefetch 2, rank 0 has prefetch 1",
        ),
        (
            |rank| ModelOptions::on(if rank == 2 { mesh(4, 1) } else { mesh(2, 2) }),
            "rank 2 has mesh 4x1, rank 0 has mesh 2x2",
        ),
        (
            |rank| {
                let unused = if rank == 1 { Unused::ErrorOnAnyRank } else { Unused::Zeros };
                ModelOptions { unused, ..ModelOptions::on(mesh(2, 2)) }
            },
            "rank 1 has unused ErrorOnAnyRank, rank 0 has unused Zeros",
        ),
        (
            |rank| {
                let output = (rank == 1).then_some(DType::BF16);
                let precision = Precision { output, ..Precision::default() };
                ModelOptions { precision, ..ModelOptions::on(mesh(1, 4)) }
            },
            "rank 1 has precision.output bf16, rank 0 has precision.output as it is",
        ),
    ];
    for (options, who_has_what) in of_ranks {
        let error = common_error(outcomes(4, |world| {
            let options = options(world.rank().index());
            springs::model(world, &options)
        }));
        let expected = format!("an option of the model differs between ranks: {who_has_what}");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn ranks_with_different_models_are_told_the_first_parameter_that_differs() {
    let error = common_error(outcomes(4, |world| {
        let rows = if world.rank().index() == 2 { 5 } else { 4 };
        let unit = Unit::new("head").param(Param::new("w", [rows, 3])).param(Param::new("b", [3]));
        let spec = ModelSpec::new().unit(unit);
        springs::model_of(world, &spec, &ModelOptions::on(mesh(2, 2)))
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
        let one = springs::model(world.clone(), &on)?;
        let other = springs::model(world, &ModelOptions { prefetch: 2, ..on })?;
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
        springs::model_of(world, &spec, &ModelOptions::on(mesh(2, 2)))
    }));
    let expected = "the model spec differs between ranks: rank 2 has rope_theta 500000, rank 0 has \
                    rope_theta 10000";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn ranks_whose_buffers_have_another_shape_or_rule_are_named() {
    let mean = || Param::new("mean", [4]);
    let of_one = [
        (Param::new("mean", [5]).buffer(), "buffer `mean` [5] in unit 3"),
        (mean().averaged_buffer(), "buffer `mean` [4], averaged over the ranks in unit 3"),
        (Param::new("var", [4]).buffer(), "buffer `var` [4] in unit 3"),
        (mean().frozen(), "parameter `mean` [4], frozen in unit 3"),
    ];
    for (other, line) in of_one {
        let error = common_error(outcomes(4, |world| {
            let buffer = if world.rank().index() == 2 { other.clone() } else { mean().buffer() };
            let norm = Unit::new("bn").param(Param::new("bn.weight", [4])).param(buffer);
            let spec = three_units().unit(norm);
            springs::model_of(world, &spec, &ModelOptions::on(mesh(2, 2)))
        }));
        let expected = format!(
            "the model spec differs between ranks: rank 2 has {line}, rank 0 has buffer `mean` [4] \
             in unit 3"
        );
        assert_eq!(error.to_string(), expected);
    }
}

/// Replicas divide shards by the blocks.
#[test]
fn ranks_whose_blocks_of_state_differ_are_named() {
    let error = common_error(outcomes(4, |world| {
        let block = if world.rank().index() == 2 { 512 } else { 256 };
        let spec = three_units().updated_by(|_| State::EightBit { block });
        springs::model_of(world, &spec, &ModelOptions::on(mesh(2, 2)))
    }));
    let message = error.to_string();
    let expected = "the model spec differs between ranks: rank 2 has parameter `first.weight` [";
    assert!(message.starts_with(expected), "{message}");
    for block in [512, 256] {
        let named = format!("], with 8-bit state in blocks of {block} in unit 0");
        assert!(message.contains(&named), "{message}");
    }
}
