//! Rows 21, 24, 25 and 26: gradients that are missing, not finite, many and small, or of a step
//! that is over.

use std::time::Instant;

use hsdp::{
    AdamW, AdamWOptions, DType, Error, GradientError, ModelOptions, NonFinite, NonFiniteGradient,
    Objective, Optimizer, Origin, Param, Precision, Rank, ShardedModel, StepOptions, Unused, World,
};
use hsdp_comm::{Channel, FaultKind, Stage, Tag};
use hsdp_tests::support::models::{one_parameter, unit};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use hsdp_tests::support::{slopes, springs};

use crate::runner::Happened;
use crate::training::{ALL, CULPRIT, FAULTY, RANKS, Training};

pub(crate) fn missing() -> Happened {
    let zeros = common(trained_with(Unused::Zeros, Some(0.0)));
    let none = common(trained_with(Unused::Zeros, None));
    assert_eq!(none, zeros, "a gradient that is missing is zeros");
    let started = Instant::now();
    let refused = trained_with(Unused::ErrorOnAnyRank, None);
    let took = started.elapsed();
    let (told, kept) = common(refused);
    let [told] = told.as_slice() else { panic!("it is refused once, then given: {told:?}") };
    let (no_errors, applied) = zeros;
    assert!(no_errors.is_empty() && applied != kept, "one of the two steps was refused");
    Happened::in_time(told, took)
}

type Trained = (Vec<String>, std::collections::BTreeMap<String, Vec<f32>>);

/// Two steps of AdamW. In the first, the culprit's slope of `second.bias` is as given; 0.5 anywhere
/// else.
fn trained_with(unused: Unused, given: Option<f32>) -> Vec<Trained> {
    on_ranks(RANKS, |world| {
        let rank = world.rank().index();
        let options = ModelOptions { unused, ..ModelOptions::on(mesh(2, 2)) };
        let mut model = springs::model(world, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let mut told = Vec::new();
        for number in 0..2 {
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let concerned =
                |param: &Param| (number, rank, &*param.name) == (0, CULPRIT, "second.bias");
            let slope = |param: &Param| if concerned(param) { given } else { Some(0.5) };
            slopes::microbatch_by(&mut step, &slope)?;
            match step.finish() {
                Ok(gradients) => drop(adamw.step(&mut model, gradients)?),
                Err(error @ Error::Gradients(GradientError::UnusedParameters { .. })) => {
                    told.push(error.to_string())
                }
                Err(error) => return Err(error),
            }
        }
        Ok((told, model.full_parameters()?))
    })
}

/// Under either policy all ranks are told of the same gradient, and the parameters that they train
/// on to are those of a run without it: neither they nor the optimizer's moments have seen the
/// step.
pub(crate) fn not_finite() -> Happened {
    let [happened, _] = [NonFinite::Abort, NonFinite::Skip].map(|non_finite| {
        let fault = FaultKind::NonFinite(f32::NAN);
        let poisoned = Training::with_fault((unit(1), Stage::Reduce), fault);
        let model = ModelOptions { non_finite, ..poisoned.model.clone() };
        let run = Training { model, ..poisoned }.run();
        let (error, happened) = run.told(&ALL);
        let Error::Gradients(GradientError::NonFinite(NonFiniteGradient { step: FAULTY, origin })) =
            error
        else {
            panic!("{error}");
        };
        let parameter = "second.weight".to_owned();
        let expected = Origin::Gradient { parameter, rank: Rank::new(CULPRIT), microbatch: 0 };
        assert_eq!(*origin, expected, "{non_finite:?}");
        let skipped = u64::from(non_finite == NonFinite::Skip);
        assert_eq!(ALL.map(|rank| run.fared(rank).skipped), [skipped; RANKS], "{non_finite:?}");
        run.assert_no_trace();
        happened
    });
    happened
}

const ELEMENTS: usize = 200;

pub(crate) fn many_and_small() -> Happened {
    let started = Instant::now();
    let gradient =
        common(on_ranks(RANKS, |world| gradient(&mut model(world, DType::BF16)?, &[1.0; 300])));
    assert_eq!(gradient, [300.0; ELEMENTS]);
    Happened::after(&"300 microbatches of 1 give 300", started.elapsed())
}

pub(crate) fn of_an_aborted_step() -> Happened {
    let told = on_ranks(RANKS, |world| {
        let everybody = world.world_group(Channel::User);
        let started = Instant::now();
        let mut model = model(world, DType::F32)?;
        let mut step = model.begin_step(StepOptions::microbatches(2))?;
        slopes::microbatch(&mut step, 100.0)?;
        // All have it in their partials; then one of them gives up, and the others go on.
        everybody.barrier(Tag::default())?.wait()?;
        let told = if everybody.rank().index() == CULPRIT {
            drop(step);
            None
        } else {
            let ended = slopes::microbatch(&mut step, 100.0).and_then(|()| step.finish().map(drop));
            Some(ended.expect_err("the step is given up").to_string())
        };
        let took = started.elapsed();
        assert_eq!(gradient(&mut model, &[1.0])?, [1.0; ELEMENTS], "and not 101");
        Ok((told, took))
    });
    let took = told.iter().map(|(_, took)| *took).max().expect("there are ranks");
    let told = common(told.into_iter().filter_map(|(told, _)| told).collect());
    Happened::in_time(&format!("{told}; the next gradient is 1"), took)
}

fn model(world: World, wire: DType) -> Result<ShardedModel, Error> {
    let precision = Precision { wire, ..Precision::default() };
    let objective = Objective::RankMean;
    let options = ModelOptions { precision, objective, ..ModelOptions::on(mesh(2, 2)) };
    ShardedModel::new(world, one_parameter(ELEMENTS), options, springs::initial)
}

/// The gradient of a step of microbatches with these slopes.
fn gradient(model: &mut ShardedModel, slopes: &[f32]) -> Result<Vec<f32>, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(slopes.len()))?;
    for slope in slopes {
        slopes::microbatch(&mut step, *slope)?;
    }
    Ok(step.finish()?.full(model)?.remove("w").expect("the parameter"))
}
