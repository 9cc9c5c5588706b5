//! Gradients that no optimizer has taken: the next step warns of them, once for a model and rank,
//! and of no others.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hsdp::{
    AdamW, AdamWOptions, Error, GradientError, Gradients, Mesh, ModelOptions, NonFinite, Optimizer,
    Sgd, SgdOptions, ShardedModel, StepOptions, World,
};
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{mesh, on_ranks};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::updates::{gradients, model};

/// The warnings of a run on this thread.
fn warnings(run: impl FnOnce()) -> Vec<String> {
    let said = Said::default();
    tracing::subscriber::with_default(said.clone(), run);
    said.warnings().into_iter().map(|(said, _)| said).collect()
}

fn updated(model: &mut ShardedModel) {
    let gradients = gradients(model);
    model.update(gradients, |_| ()).expect("an update");
}

#[test]
fn an_update_that_is_forgotten_is_told_once() {
    let said = warnings(|| {
        let mut model = model();
        updated(&mut model);
        for _ in 0..3 {
            drop(gradients(&mut model));
        }
    });
    let [said] = &*said else { panic!("{said:?}") };
    let begins = "message=the gradients of a step were dropped, and no optimizer has updated";
    assert!(said.starts_with(begins) && said.ends_with("rank=0 step=1 next=2"), "{said}");
}

/// A subscriber that panics on a warning, as a test's may.
struct Panics;

impl Subscriber for Panics {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        panic!("a warning");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_step_whose_warning_panics_is_aborted_by_the_next_one() {
    let _all_warnings = Said::default();
    let mut model = model();
    drop(gradients(&mut model));
    let begun = tracing::subscriber::with_default(Panics, || {
        let begin = || model.begin_step(StepOptions::microbatches(1)).map(drop);
        catch_unwind(AssertUnwindSafe(begin)).is_ok()
    });
    assert!(!begun);
    let error = model.begin_step(StepOptions::microbatches(1)).map(drop).expect_err("it is leaked");
    assert!(error.to_string().contains("step 1 was neither finished nor dropped"), "{error}");
    updated(&mut model);
    model.end_run().expect("the run ends");
}

#[test]
fn each_rank_tells_of_it_once() {
    let said = on_ranks(4, |world| {
        let options = ModelOptions::on(mesh(2, 2));
        let mut model = springs::model(world, &options)?;
        let said = Said::default();
        let _said = tracing::subscriber::set_default(said.clone());
        for _ in 0..3 {
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            slopes::microbatch(&mut step, 1.0)?;
            drop(step.finish()?);
        }
        model.end_run()?;
        let ours = |(said, _): &(String, _)| said.contains("the gradients of a step were dropped");
        Ok(said.warnings().iter().filter(|it| ours(it)).count())
    });
    assert_eq!(said, [1; 4]);
}

#[test]
fn gradients_that_an_optimizer_takes_are_not_forgotten() {
    let said = warnings(|| {
        let mut model = model();
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        for _ in 0..2 {
            let gradients = gradients(&mut model);
            adamw.step(&mut model, gradients.clip(0.5)).expect("an update");
            updated(&mut model);
        }
    });
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn gradients_that_are_discarded_are_not_forgotten() {
    let said = warnings(|| {
        let mut model = model();
        gradients(&mut model).discard();
        updated(&mut model);
    });
    assert!(said.is_empty(), "{said:?}");
}

/// All ranks have agreed not to apply them: a caller may drop them as well.
#[test]
fn gradients_that_are_to_be_skipped_are_not_forgotten() {
    let said = warnings(|| {
        let on = ModelOptions::on(Mesh::SINGLE);
        let options = ModelOptions { non_finite: NonFinite::Skip, ..on };
        let mut model = springs::model(World::single(), &options).expect("a model");
        for _ in 0..2 {
            let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
            slopes::microbatch(&mut step, f32::INFINITY).expect("a microbatch");
            drop(step.finish().expect("gradients to skip"));
        }
    });
    assert!(said.is_empty(), "{said:?}");
}

/// Nothing follows: the caller may have wanted no more than the gradients.
#[test]
fn the_gradients_of_the_last_step_are_not_forgotten() {
    let said = warnings(|| {
        let mut model = model();
        drop(gradients(&mut model));
        model.end_run().expect("the run ends");
    });
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn gradients_that_are_kept_are_forgotten_only_when_they_are_dropped() {
    let mut model = model();
    let mut kept: Vec<Gradients> = Vec::new();
    let said = warnings(|| {
        for _ in 0..3 {
            kept.push(gradients(&mut model));
        }
    });
    assert!(said.is_empty(), "{said:?}");
    drop(kept);
    let said = warnings(|| updated(&mut model));
    assert_eq!(said.len(), 1, "{said:?}");
}

/// An optimizer that refuses a step: it was made for another model, or has options that it does not
/// allow.
fn refused(model: &mut ShardedModel, mut optimizer: impl Optimizer) {
    let gradients = gradients(model);
    optimizer.step(model, gradients).expect_err("it is refused");
}

/// The caller has an error, and needs no warning: of the step, of the optimizer that refuses them,
/// or a panic.
#[test]
fn what_an_error_or_a_panic_ends_is_not_forgotten() {
    let said = warnings(|| {
        let mut model = model();
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        slopes::microbatch(&mut step, f32::NAN).expect("a microbatch");
        assert!(matches!(step.finish(), Err(Error::Gradients(GradientError::NonFinite(_)))));
        let empty = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        empty.finish().map(drop).expect_err("it has no microbatch");

        let older = gradients(&mut model);
        updated(&mut model);
        model.update(older, |_| ()).expect_err("they are stale");

        refused(&mut model, AdamW::new(&self::model(), AdamWOptions::default()));
        refused(&mut model, Sgd::new(&self::model(), SgdOptions::default()));
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        adamw.set_learning_rate(f64::NAN);
        refused(&mut model, adamw);
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        sgd.set_learning_rate(-1.0);
        refused(&mut model, sgd);

        let panics = AssertUnwindSafe(|| {
            let _held = gradients(&mut model);
            panic!("a program is broken");
        });
        assert!(catch_unwind(panics).is_err());
        updated(&mut model);
    });
    assert!(said.is_empty(), "{said:?}");
}
