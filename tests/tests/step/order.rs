//! The order in which collectives are issued and parameters handed out.
//!
//! Orders are written as lines, one a microbatch, of these words (the number is the unit's):
//!
//! | word | event |
//! |---|---|
//! | `g1` | the gather of unit 1 for the forward is issued |
//! | `g1'` | the same, for the backward |
//! | `u1`, `u1'` | the gathered unit is handed out |
//! | `r1` | its reduce-scatter is issued |
//! | `a1` | its all-reduce is issued |

use std::sync::Arc;

use hsdp::{
    Accumulation, Error, Event, LossSum, Mesh, ModelOptions, ModelSpec, Pass, ShardedModel,
    StepOptions, UnitGradients, UnitOrder,
};
use hsdp_comm::{Channel, Tag};
use hsdp_sharding::step::{DryRun, Output, Rules};
use hsdp_tests::support::events::word;
use hsdp_tests::support::models::{keeping_the_second, partly_frozen, three_units, unit};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use hsdp_tests::support::{slopes, springs};

/// One microbatch with every unit resharded, nothing ahead, and no replicas.
const PLAIN: &str = "g0 u0 g1 u1 g2 u2 g2' u2' r2 g1' u1' r1 g0' u0' r0";

/// A rank gathers, hands out and reduces in the order of the machine, whose tests have it in words.
/// Reduce-scatters complete at once where shards are whole, and all-reduces behind them begin at
/// once, as in a dry run.
#[test]
fn the_engine_gathers_hands_out_and_reduces_as_the_machine_says() {
    let follow = ModelOptions { prefetch: 1, ..ModelOptions::on(mesh(1, 2)) };
    let ahead = |prefetch| ModelOptions { prefetch, ..plain(mesh(1, 2)) };
    let mode = |accumulation, mesh| ModelOptions { accumulation, ..plain(mesh) };
    let of = |count| StepOptions::microbatches(count);
    let unknown = StepOptions { microbatches: None, ..StepOptions::default() };
    for (spec, options, step) in [
        (three_units(), ahead(0), of(1)),
        (three_units(), ahead(0), of(3)),
        (three_units(), ahead(1), of(1)),
        (three_units(), ahead(2), of(1)),
        (three_units(), ahead(100), of(2)),
        (three_units(), follow, of(2)),
        (keeping_the_second(), ahead(1), of(1)),
        (partly_frozen(), ahead(0), of(1)),
        (three_units(), plain(mesh(2, 1)), of(2)),
        (three_units(), plain(mesh(2, 1)), unknown),
        (three_units(), plain(mesh(2, 2)), unknown),
        (three_units(), mode(Accumulation::Every, mesh(2, 2)), of(2)),
        (three_units(), mode(Accumulation::Local, mesh(2, 1)), of(2)),
        (three_units(), mode(Accumulation::Local, mesh(2, 2)), unknown),
    ] {
        let [machine, engine] = order(&spec, &options, step);
        assert_eq!(engine, machine, "{options:?}, {step:?}");
    }
}

#[test]
fn units_asked_for_in_another_order_are_gathered_in_the_plans() {
    let told = scripted(|pass, _| {
        for index in [2, 0, 1] {
            let _ = pass.unshard(unit(index))?;
        }
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        for index in [0, 2, 1] {
            let _ = pass.unshard(unit(index))?;
            reduce(pass, index)?;
        }
        Ok(())
    });
    let expected = "g0 g1 g2 u2 u0 u1 g2' g1' g0' u0' u2' r2 u1' r1 r0";
    assert_eq!(told, [expected, expected]);
}

#[test]
fn a_unit_skipped_on_one_rank_is_gathered_and_reduced_there_all_the_same() {
    let told = scripted(|pass, rank| {
        let used: &[usize] = if rank == 0 { &[0, 1, 2] } else { &[0, 2] };
        for index in used {
            let _ = pass.unshard(unit(*index))?;
        }
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        for index in used.iter().rev() {
            let _ = pass.unshard(unit(*index))?;
            reduce(pass, *index)?;
        }
        Ok(())
    });
    assert_eq!(told, [PLAIN, "g0 u0 g1 g2 u2 g2' u2' r2 g1' g0' u0' r1 r0"]);
}

#[test]
fn a_rank_that_uses_nothing_takes_part_in_everything() {
    let told = scripted(|pass, rank| {
        for index in (0..3).filter(|_| rank == 0) {
            let _ = pass.unshard(unit(index))?;
        }
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        for index in (0..3).rev().filter(|_| rank == 0) {
            let _ = pass.unshard(unit(index))?;
            reduce(pass, index)?;
        }
        Ok(())
    });
    assert_eq!(told, [PLAIN, "g0 g1 g2 g2' g1' g0' r2 r1 r0"]);
}

#[test]
fn reductions_offered_in_another_order_are_issued_in_the_plans() {
    let told = scripted(|pass, rank| {
        let _ = pass.loss(LossSum::new(0.0, 1))?;
        let order = if rank == 0 { [2, 1, 0] } else { [1, 0, 2] };
        order.into_iter().try_for_each(|index| reduce(pass, index))
    });
    let expected = "g0 g1 g2 r2 r1 r0 g2' g1' g0'";
    assert_eq!(told, [expected, expected]);
}

/// The position of an all-reduce depends on when its reduce-scatter completes; after a barrier it
/// has.
#[test]
fn an_all_reduce_starts_while_the_backward_goes_on() {
    let options = plain(mesh(2, 2));
    let told = on_ranks(4, |world| {
        let here = world.world_group(Channel::User);
        let mut model = springs::model(world, &options)?;
        recorded(&mut model, |model| {
            let mut step = model.begin_step(once())?;
            let mut pass = step.microbatch()?;
            let _ = pass.loss(LossSum::new(0.0, 1))?;
            for index in [2, 1, 0] {
                reduce(&mut pass, index)?;
                here.barrier(Tag::default())?.wait()?;
            }
            pass.finish()?;
            step.finish().map(drop)
        })
    });
    for told in told {
        let at = |word: &str| told.find(word).unwrap_or_else(|| panic!("no {word} in {told}"));
        assert!(at("r2") < at("a2") && at("a2") < at("r0"), "{told}");
        assert_eq!(only('a', &told), "a2 a1 a0");
    }
}

/// Nothing ahead, the declared order from the first microbatch on, everything else as it comes.
fn plain(mesh: Mesh) -> ModelOptions {
    ModelOptions { prefetch: 0, order: UnitOrder::Error, ..ModelOptions::on(mesh) }
}

fn once() -> StepOptions {
    StepOptions::microbatches(1)
}

/// The order of a first step by the machine, and that on every rank; of two microbatches where
/// `step` does not say.
fn order(spec: &ModelSpec, options: &ModelOptions, step: StepOptions) -> [String; 2] {
    let run = |model: &mut ShardedModel| {
        let mut begun = model.begin_step(step)?;
        for _ in 0..step.microbatches.unwrap_or(2) {
            slopes::microbatch(&mut begun, 1.0)?;
        }
        begun.finish().map(drop)
    };
    let rules = Rules { order: options.order, ..Rules::default() };
    common(on_ranks(options.mesh.world_size(), |world| {
        let mut model = springs::model_of(world, spec, options)?;
        let plan = Arc::new(model.plan().clone());
        let machine = words(&DryRun::of(&plan, rules, step.microbatches, 2));
        Ok::<_, Error>([machine, recorded(&mut model, run)?])
    }))
}

/// The gathers, hand-outs and reductions of a step in words, a line a microbatch. Those of its end
/// belong to the last one.
fn words(step: &DryRun) -> String {
    let line = |outputs: &[Output]| -> String {
        let words = outputs.iter().map(ToString::to_string);
        words.filter(|it| it.starts_with(['g', 'u', 'r', 'a'])).collect::<Vec<_>>().join(" ")
    };
    let lines = step.microbatches.iter().map(|outputs| line(outputs)).collect::<Vec<_>>();
    format!("{} {}", lines.join("\n"), line(&step.finish)).trim_end().to_owned()
}

/// The order of the second step on two ranks, each of which follows the script in its own way. The
/// first step has found that the units are used as declared.
fn scripted(script: impl Fn(&mut Pass<'_>, usize) -> Result<(), Error> + Sync) -> Vec<String> {
    on_ranks(2, |world| {
        let rank = world.rank().index();
        let options = ModelOptions { order: UnitOrder::Follow, ..plain(mesh(1, 2)) };
        let mut model = springs::model(world, &options)?;
        recorded(&mut model, |model| {
            let mut step = model.begin_step(once())?;
            slopes::microbatch(&mut step, 1.0)?;
            let gradients = step.finish()?;
            model.update(gradients, |_| {})?;
            let _ = model.take_events();
            model.record_events();
            let mut step = model.begin_step(once())?;
            let mut pass = step.microbatch()?;
            script(&mut pass, rank)?;
            pass.finish()?;
            step.finish().map(drop)
        })
    })
}

fn recorded(
    model: &mut ShardedModel,
    run: impl FnOnce(&mut ShardedModel) -> Result<(), Error>,
) -> Result<String, Error> {
    model.record_events();
    run(model)?;
    Ok(told(&model.take_events()))
}

/// Gives zeros for every parameter of a unit.
fn reduce(pass: &mut Pass<'_>, index: usize) -> Result<(), Error> {
    let handle = pass.handle();
    let params = &handle.plan().spec()[unit(index)].params;
    let zeros = params.iter().map(|param| vec![0.0_f32; param.numel()]);
    pass.reduce(unit(index), UnitGradients::of(zeros))
}

/// Events in words, a line a microbatch.
fn told(events: &[Event]) -> String {
    let mut lines: Vec<Vec<String>> = Vec::new();
    for event in events {
        let (microbatch, word) = word(event);
        lines.resize(lines.len().max(microbatch + 1), Vec::new());
        assert_eq!(lines.len(), microbatch + 1, "{word} of a microbatch that is over");
        lines[microbatch].push(word);
    }
    let lines: Vec<String> = lines.into_iter().map(|words| words.join(" ")).collect();
    lines.join("\n")
}

/// The words that begin with `initial`.
fn only(initial: char, told: &str) -> String {
    told.split_whitespace().filter(|word| word.starts_with(initial)).collect::<Vec<_>>().join(" ")
}
