//! The order in which a forward uses the units becomes the schedule, whatever was declared.

use std::collections::BTreeMap;

use hsdp::sharding::AfterForward;
use hsdp::{
    AdamW, AdamWOptions, Error, Gradients, LossSum, ModelOptions, Optimizer, Pass, ShardedModel,
    StepOptions, Uneven, UnitGradients, UnitId, UnitOrder, Unused,
};
use hsdp_tests::support::handmade::in_f32;
use hsdp_tests::support::models::{keeping_the_second, unit};
use hsdp_tests::support::springs;
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{common, mesh, on_ranks, outcomes};

#[test]
fn only_the_schedule_changes() {
    let used = [2, 0, 1];
    let seen = common(on_ranks(4, |world| {
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        let before = (model.plan().order().to_vec(), model.plan().order_digest());
        let fingerprint = model.plan().fingerprint();
        step(&mut model, &used)?;
        assert_eq!(model.plan().fingerprint(), fingerprint);
        assert_ne!(model.plan().order_digest(), before.1);
        assert_eq!(before.0, [0, 1, 2].map(UnitId::new));
        Ok(model.plan().order().to_vec())
    }));
    assert_eq!(seen, used.map(UnitId::new));
}

/// The same parameters, bit for bit, in whichever order the units are used, found or declared.
#[test]
fn results_do_not_depend_on_the_order() {
    let trained = |used: &'static [usize], order| {
        common(on_ranks(4, move |world| {
            let options = ModelOptions { order, ..ModelOptions::on(mesh(2, 2)) };
            let mut model = springs::model(world, &options)?;
            let mut adamw = AdamW::new(&model, AdamWOptions::default());
            for _ in 0..3 {
                let gradients = gradients(&mut model, used)?;
                adamw.step(&mut model, gradients.clip(1.0))?;
            }
            bits(&model.full_parameters()?)
        }))
    };
    let declared = trained(&[0, 1, 2], UnitOrder::Error);
    assert_eq!(trained(&[0, 1, 2], UnitOrder::Follow), declared);
    assert_eq!(trained(&[2, 0, 1], UnitOrder::Follow), declared);
    assert_eq!(trained(&[0, 2, 1], UnitOrder::Follow), declared);
}

/// A kept unit has one gather, also if it was gathered as declared before a rank left that order.
#[test]
fn kept_units_stay_from_their_use_in_the_order_that_is_found() {
    for used in [[0, 1, 2], [0, 2, 1], [1, 2, 0], [2, 1, 0]] {
        let order = common(on_ranks(2, |world| {
            let on = ModelOptions::on(mesh(1, 2));
            let mut model = springs::model_of(world, &keeping_the_second(), &on)?;
            for _ in 0..2 {
                step(&mut model, &used)?;
            }
            Ok(model.plan().order().to_vec())
        }));
        assert_eq!(order, used.map(UnitId::new));
    }
}

#[test]
fn ranks_that_differ_keep_the_declared_order_and_rank_0_warns() {
    let outcomes = on_ranks(2, |world| {
        let said = Said::default();
        let rank = world.rank().index();
        let order = tracing::subscriber::with_default(said.clone(), || {
            let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
            let used: &[usize] = if rank == 0 { &[0, 1, 2] } else { &[0, 2, 1] };
            step(&mut model, used)?;
            step(&mut model, used)?;
            Ok::<_, Error>(model.plan().order().to_vec())
        })?;
        assert_eq!(order, [0, 1, 2].map(UnitId::new));
        Ok(said.warnings().into_iter().map(|(said, _)| said).collect::<Vec<_>>())
    });
    let [warned, silent] = &outcomes[..] else { panic!("two ranks") };
    assert!(silent.is_empty(), "{silent:?}");
    let [warning] = &warned[..] else { panic!("one warning is expected: {warned:?}") };
    assert!(warning.contains("rank 0 needs unit second, rank 1 needs unit third"), "{warning}");
}

#[test]
fn a_rank_that_skips_a_unit_differs() {
    let order = common(on_ranks(2, |world| {
        let used: &[usize] = if world.rank().index() == 0 { &[2, 1] } else { &[2, 1, 0] };
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        step(&mut model, used)?;
        Ok(model.plan().order().to_vec())
    }));
    assert_eq!(order, [0, 1, 2].map(UnitId::new));
}

#[test]
fn units_that_no_rank_uses_come_last() {
    let order = common(on_ranks(2, |world| {
        let options = ModelOptions { unused: Unused::Zeros, ..ModelOptions::on(mesh(1, 2)) };
        let mut model = springs::model(world, &options)?;
        step(&mut model, &[2])?;
        Ok(model.plan().order().to_vec())
    }));
    assert_eq!(order, [2, 0, 1].map(UnitId::new));
}

/// A rank without data, and a rank that ends its microbatch without a forward, gather what the
/// others use.
#[test]
fn ranks_without_a_forward_follow() {
    let order = common(on_ranks(3, |world| {
        let rank = world.rank();
        let options = ModelOptions { uneven: Uneven::ZeroWeight, ..ModelOptions::on(mesh(1, 3)) };
        let mut model = springs::model(world, &options)?;
        let options = StepOptions::microbatches(1);
        let options = if rank.index() == 1 { options.without_data() } else { options };
        let mut step = model.begin_step(options)?;
        match rank.index() {
            0 => forward_and_backward(step.microbatch()?, &[1, 2, 0])?,
            1 => {}
            _ => step.microbatch()?.finish()?,
        }
        let gradients = step.finish()?;
        model.update(gradients, |_| {})?;
        Ok(model.plan().order().to_vec())
    }));
    assert_eq!(order, [1, 2, 0].map(UnitId::new));
}

#[test]
fn a_microbatch_without_any_forward_leaves_the_order_open() {
    let order = common(on_ranks(2, |world| {
        let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
        let mut step = model.begin_step(StepOptions::microbatches(2))?;
        step.microbatch()?.finish()?;
        forward_and_backward(step.microbatch()?, &[2, 1, 0])?;
        let gradients = step.finish()?;
        model.update(gradients, |_| {})?;
        Ok(model.plan().order().to_vec())
    }));
    assert_eq!(order, [2, 1, 0].map(UnitId::new));
}

/// A rank that gives up may have found the order, or not: all ranks find it again.
#[test]
fn a_step_that_is_dropped_while_the_order_is_found_is_tried_again() {
    for reached in 0..=4 {
        let order = common(on_ranks(2, |world| {
            let rank = world.rank();
            let mut model = springs::model(world, &ModelOptions::on(mesh(1, 2)))?;
            let used = [1, 0, 2];
            let mut first = model.begin_step(StepOptions::microbatches(1))?;
            let mut pass = first.microbatch()?;
            if rank.index() == 0 {
                for index in used.iter().take(reached) {
                    let _ = pass.unshard(unit(*index))?;
                }
                if reached > 3 {
                    let _ = pass.loss(LossSum::new(0.0, 1))?;
                }
                drop(pass);
                first.abandon("a bad batch");
            } else {
                let error = forward_and_backward(pass, &used);
                let error = error.and_then(|()| first.finish().map(drop));
                let error = error.expect_err("rank 0 has given up").to_string();
                assert!(error.contains("a bad batch"), "{error}");
            }
            assert_eq!(model.plan().order(), [0, 1, 2].map(UnitId::new));
            step(&mut model, &used)?;
            Ok(model.plan().order().to_vec())
        }));
        assert_eq!(order, [1, 0, 2].map(UnitId::new), "given up after {reached} units");
    }
}

#[test]
fn another_order_can_be_refused() {
    let options = ModelOptions { order: UnitOrder::Error, ..ModelOptions::on(mesh(1, 2)) };
    let ends = outcomes(2, |world| {
        let used: &[usize] = if world.rank().index() == 0 { &[0, 1, 2] } else { &[0, 2, 1] };
        let mut model = springs::model(world, &options.clone())?;
        step(&mut model, used)
    });
    let errors = ends.into_iter().map(|end| end.expect_err("refused").to_string());
    let [told, refused] = &errors.collect::<Vec<_>>()[..] else { panic!("two ranks") };
    let expected = "unshard on rank 1, step 0: unit second is used after unit third, which is declared behind it";
    assert!(refused.starts_with(expected), "{refused}");
    assert!(told.contains(expected), "{told}");
}

fn step(model: &mut ShardedModel, used: &[usize]) -> Result<(), Error> {
    let gradients = gradients(model, used)?;
    model.update(gradients, |_| {}).map(drop)
}

/// One step of one microbatch, which uses the units in this order.
fn gradients(model: &mut ShardedModel, used: &[usize]) -> Result<Gradients, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    forward_and_backward(step.microbatch()?, used)?;
    step.finish()
}

/// Uses the units in this order, and in reverse for the backward, in which each element has its own
/// value as its gradient.
fn forward_and_backward(mut pass: Pass<'_>, used: &[usize]) -> Result<(), Error> {
    let handle = pass.handle();
    let is_kept =
        |index: usize| handle.plan().spec()[unit(index)].after_forward == AfterForward::Keep;
    let mut kept = BTreeMap::new();
    for index in used {
        let full = pass.unshard(unit(*index))?;
        if is_kept(*index) {
            kept.insert(*index, full);
        }
    }
    let seed = in_f32(pass.loss(LossSum::new(1.0, 1))?.value());
    for index in used.iter().rev() {
        let full = kept.remove(index).map_or_else(|| pass.unshard(unit(*index)), Ok)?;
        let scaled = |at| -> Vec<f32> {
            full.values(at).to_f32().into_iter().map(|value| value * seed).collect()
        };
        let params = handle.plan().spec()[unit(*index)].params.len();
        let gradients = UnitGradients::of((0..params).map(scaled));
        drop(full);
        pass.reduce(unit(*index), gradients)?;
    }
    pass.finish()
}

fn bits(parameters: &BTreeMap<String, Vec<f32>>) -> Result<Vec<u32>, Error> {
    Ok(parameters.values().flatten().map(|value| value.to_bits()).collect())
}
