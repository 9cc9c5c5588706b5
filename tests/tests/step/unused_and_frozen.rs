//! Parameters that no rank or only some ranks use, frozen parameters, and tied parameters, which
//! have two names.

use std::collections::BTreeMap;

use hsdp::{
    AdamW, AdamWOptions, Error, LossSum, ModelOptions, ModelSpec, Objective, Optimizer, Param, Sgd,
    SgdOptions, ShardedModel, StepOptions, Unit, UnitGradients, Unused,
};
use hsdp_sharding::Role;
use hsdp_tests::support::models::{partly_frozen, three_units, unit};
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common, common_error, mesh, on_ranks, outcomes};
use hsdp_tests::support::{slopes, springs};

type Parameters = BTreeMap<String, Vec<f32>>;

/// The parameter that some of these tests do not use.
const SPARE: &str = "second.bias";

#[test]
fn a_parameter_that_nobody_uses_is_left_alone() {
    let trained = trained_by_adamw(&[without_the_spare]);
    assert_eq!(trained[SPARE], initial(&three_units())[SPARE]);
    let moved = |name: &str| trained[name] != initial(&three_units())[name];
    assert!(trained.keys().all(|name| moved(name) || name == SPARE));
}

#[test]
fn the_optimizer_state_of_a_parameter_that_nobody_uses_does_not_age() {
    let late = trained_by_adamw(&[without_the_spare, without_the_spare, all_of_them]);
    let fresh = trained_by_adamw(&[all_of_them]);
    assert_eq!(late[SPARE], fresh[SPARE]);
    assert_ne!(late["second.weight"], fresh["second.weight"]);
}

#[test]
fn a_parameter_that_one_rank_uses_gets_the_mean_of_its_gradient_and_zeros() {
    let gradient = gradient(4, |rank, microbatch, name| match (rank, microbatch, name) {
        (1, 0, SPARE) => Some(4.0),
        (_, 0, "first.weight") => Some(1.0),
        _ => None,
    });
    assert!(gradient[SPARE].iter().all(|gradient| *gradient == 1.0), "{:?}", gradient[SPARE]);
    assert!(gradient["first.weight"].iter().all(|gradient| *gradient == 1.0));
}

/// FSDP2's case of different parameters in different microbatches: a gets 4 and 2, b gets 5.
#[test]
fn what_is_used_may_change_from_microbatch_to_microbatch() {
    let gradient = gradient(4, |_, microbatch, name| match (microbatch, name) {
        (0, "first.weight") => Some(4.0),
        (1, "third.bias") => Some(5.0),
        (2, "first.weight") => Some(2.0),
        _ => None,
    });
    assert!(gradient["first.weight"].iter().all(|gradient| *gradient == 6.0));
    assert!(gradient["third.bias"].iter().all(|gradient| *gradient == 5.0));
    assert!(gradient[SPARE].iter().all(|gradient| *gradient == 0.0));
}

#[test]
fn whether_a_parameter_has_a_gradient_is_known_on_all_ranks() {
    let known = on_ranks(4, |world| {
        let rank = world.rank().index();
        let options = ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(mesh(2, 2)) };
        let mut model = springs::model_of(world, &three_units(), &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        slopes::microbatch_by(&mut step, &|param| {
            (rank == 3 && param.name != SPARE).then_some(1.0)
        })?;
        let gradients = step.finish()?;
        let ids: Vec<_> = model.plan().spec().params().map(|(id, _)| id).collect();
        Ok(ids.into_iter().map(|id| gradients.has_gradient(id)).collect::<Vec<_>>())
    });
    assert_eq!(common(known), [true, true, true, false, true, true]);
}

#[test]
fn an_unused_parameter_can_be_refused_by_name_and_ranks() {
    let options = ModelOptions { unused: Unused::ErrorOnAnyRank, ..ModelOptions::on(mesh(2, 2)) };
    let error = common_error(outcomes(4, |world| {
        let rank = world.rank().index();
        let mut model = springs::model_of(world, &three_units(), &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        slopes::microbatch_by(&mut step, &|param| {
            (rank == 2 || param.name != SPARE).then_some(1.0)
        })?;
        step.finish().map(drop)
    }));
    assert_eq!(
        error.to_string(),
        "step 0: parameter second.bias got no gradient on ranks [0, 1, 3]"
    );
    assert!(!error.is_fatal());
}

#[test]
fn all_unused_parameters_are_named_with_their_ranks() {
    let options = ModelOptions { unused: Unused::ErrorOnAnyRank, ..ModelOptions::on(mesh(1, 2)) };
    let error = common_error(outcomes(2, |world| {
        let rank = world.rank().index();
        let mut model = springs::model_of(world, &three_units(), &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(2))?;
        let pass = step.microbatch()?;
        pass.handle().explain_unused("an op without a backward cuts gradients");
        pass.finish()?;
        slopes::microbatch_by(&mut step, &|param| {
            let used = param.name != SPARE && (rank == 0 || param.name != "first.weight");
            used.then_some(1.0)
        })?;
        step.finish().map(drop)
    }));
    assert_eq!(
        error.to_string(),
        "step 0: parameter first.weight got no gradient on ranks [1]; parameter second.bias got no gradient on ranks [0, 1]; \
         an op without a backward cuts gradients"
    );
}

/// One warning, on rank 0, after the first step, of the parameters that have no gradient on any
/// rank.
#[test]
fn unused_parameters_are_warned_of_once() {
    let warned = on_ranks(2, |world| {
        let said = Said::default();
        let rank = world.rank().index();
        tracing::subscriber::with_default(said.clone(), || {
            let options = ModelOptions { unused: Unused::Warn, ..ModelOptions::on(mesh(1, 2)) };
            let mut model = springs::model_of(world, &three_units(), &options)?;
            for _ in 0..2 {
                let mut step = model.begin_step(StepOptions::microbatches(1))?;
                slopes::microbatch_by(&mut step, &|param| {
                    let unused = param.name == SPARE || param.name == "third.weight";
                    let here_only = param.name == "first.weight" && rank == 0;
                    (!unused && !here_only).then_some(1.0)
                })?;
                let gradients = step.finish()?;
                model.update(gradients, |_| {})?;
            }
            Ok::<_, Error>(())
        })?;
        Ok(said.warnings().into_iter().map(|(said, _)| said).collect::<Vec<_>>())
    });
    let [told, silent] = &warned[..] else { panic!("two ranks") };
    assert!(silent.is_empty(), "{silent:?}");
    let [told] = &told[..] else { panic!("one warning is expected: {told:?}") };
    let expected = "2 of 6 trainable parameters got no gradient on any rank, and are not updated: \
                    second.bias, third.weight";
    assert!(told.contains(expected), "{told}");
}

/// A step without items says nothing about the parameters that are used.
#[test]
fn a_step_without_items_does_not_take_the_warning() {
    let warned = on_ranks(1, |world| {
        let said = Said::default();
        tracing::subscriber::with_default(said.clone(), || {
            let options = ModelOptions { unused: Unused::Warn, ..ModelOptions::on(mesh(1, 1)) };
            let mut model = springs::model_of(world, &three_units(), &options)?;
            let mut empty = model.begin_step(StepOptions::microbatches(1))?;
            empty.microbatch()?.finish()?;
            empty.finish().expect_err("it has no items");
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            slopes::microbatch_by(&mut step, &|param| (param.name != SPARE).then_some(1.0))?;
            let gradients = step.finish()?;
            model.update(gradients, |_| {}).map(drop)
        })?;
        Ok(said.warnings().into_iter().map(|(said, _)| said).collect::<Vec<_>>())
    });
    let [told] = &warned[0][..] else { panic!("one warning is expected: {warned:?}") };
    assert!(
        told.contains("1 of 6 trainable parameters got no gradient") && told.contains(SPARE),
        "{told}"
    );
}

#[test]
fn a_step_goes_on_after_one_that_was_refused() {
    let options = ModelOptions { unused: Unused::ErrorOnAnyRank, ..ModelOptions::on(mesh(2, 2)) };
    let steps = on_ranks(4, |world| {
        let mut model = springs::model_of(world, &three_units(), &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        slopes::microbatch_by(&mut step, &|param| (param.name != SPARE).then_some(1.0))?;
        step.finish().expect_err("a parameter is not used");
        Ok(slopes::gradients(&mut model, 1.0)?.step())
    });
    assert_eq!(common(steps), 1);
}

#[test]
fn a_frozen_parameter_does_not_count_as_unused_and_never_moves() {
    let options = ModelOptions { unused: Unused::ErrorOnAnyRank, ..ModelOptions::on(mesh(2, 2)) };
    let trained = common(on_ranks(4, |world| {
        let mut model = springs::model_of(world, &partly_frozen(), &options)?;
        let decaying = AdamWOptions { weight_decay: 0.5, ..AdamWOptions::default() };
        let mut adamw = AdamW::new(&model, decaying);
        for _ in 0..3 {
            step(&mut model, &mut adamw, all_of_them)?;
        }
        model.full_parameters()
    }));
    let before = initial(&partly_frozen());
    for (_, param) in partly_frozen().params() {
        let moved = trained[&param.name] != before[&param.name];
        assert_eq!(moved, param.role == Role::Trainable, "{}", param.name);
    }
}

#[test]
fn a_frozen_parameter_has_no_gradient() {
    let gradient = common(on_ranks(4, |world| {
        let mut model = springs::model_of(world, &partly_frozen(), &ModelOptions::on(mesh(2, 2)))?;
        slopes::gradients(&mut model, 1.0)?.full(&model)
    }));
    assert_eq!(gradient.keys().collect::<Vec<_>>(), ["first.bias", "first.weight", "third.bias"]);
}

#[test]
fn a_tied_parameter_is_stored_once_and_moves_by_the_sum_of_its_uses() {
    let spec = ModelSpec::new()
        .unit(Unit::new("embedding").param(Param::new("embedding.weight", [10, 4])))
        .unit(Unit::new("head").param(Param::new("head.bias", [10])))
        .tie("head.weight", "embedding.weight");
    let id = spec.find("embedding.weight");
    assert_eq!(spec.find("head.weight"), id);
    let options = ModelOptions { objective: Objective::RankMean, ..ModelOptions::on(mesh(2, 2)) };
    let trained = common(on_ranks(4, |world| {
        let mut model = ShardedModel::new(world, spec.clone(), options.clone(), |param| {
            vec![1.0; param.numel()]
        })?;
        let mut sgd = Sgd::new(&model, SgdOptions { learning_rate: 1.0, ..SgdOptions::default() });
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let seed = pass.loss(LossSum::new(0.0, 1))?;
        assert_eq!(seed.value(), 1.0);
        let lookup = [0.25_f32; 40];
        let head = vec![0.5_f32; 40];
        pass.reduce(unit(1), UnitGradients::of([vec![0.125_f32; 10]]))?;
        let sum: Vec<f32> = lookup.iter().zip(&head).map(|(one, other)| one + other).collect();
        pass.reduce(unit(0), UnitGradients::of([sum]))?;
        pass.finish()?;
        let gradients = step.finish()?;
        sgd.step(&mut model, gradients)?;
        model.full_parameters()
    }));
    let expected = [
        ("embedding.weight".to_owned(), vec![0.25; 40]),
        ("head.bias".to_owned(), vec![0.875; 10]),
    ];
    assert_eq!(trained, BTreeMap::from(expected));
}

type Usage = fn(&Param) -> Option<f32>;

fn all_of_them(_: &Param) -> Option<f32> {
    Some(0.5)
}

fn without_the_spare(param: &Param) -> Option<f32> {
    (param.name != SPARE).then_some(0.5)
}

/// Parameters after one step of AdamW, with weight decay, for each usage.
fn trained_by_adamw(usages: &[Usage]) -> Parameters {
    common(on_ranks(4, |world| {
        let options = ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(mesh(2, 2)) };
        let mut model = springs::model_of(world, &three_units(), &options)?;
        let mut adamw =
            AdamW::new(&model, AdamWOptions { weight_decay: 0.5, ..AdamWOptions::default() });
        for usage in usages {
            step(&mut model, &mut adamw, *usage)?;
        }
        model.full_parameters()
    }))
}

fn step(model: &mut ShardedModel, adamw: &mut AdamW, usage: Usage) -> Result<(), Error> {
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    slopes::microbatch_by(&mut step, &usage)?;
    let gradients = step.finish()?;
    adamw.step(model, gradients).map(drop)
}

/// The mean over ranks, summed over three microbatches, where rank, microbatch and name determine
/// the slope.
fn gradient(ranks: usize, slope: impl Fn(usize, usize, &str) -> Option<f32> + Sync) -> Parameters {
    let objective = Objective::RankMean;
    let unused = Unused::Zeros;
    let options = ModelOptions { objective, unused, ..ModelOptions::on(mesh(2, ranks / 2)) };
    common(on_ranks(ranks, |world| {
        let rank = world.rank().index();
        let mut model = springs::model_of(world, &three_units(), &options)?;
        let mut step = model.begin_step(StepOptions::microbatches(3))?;
        for microbatch in 0..3 {
            slopes::microbatch_by(&mut step, &|param| slope(rank, microbatch, &param.name))?;
        }
        step.finish()?.full(&model)
    }))
}

fn initial(spec: &ModelSpec) -> Parameters {
    spec.params().map(|(_, param)| (param.name.clone(), springs::initial(param))).collect()
}
