use std::sync::Arc;

use super::*;
use crate::{Accumulation, Mesh, ModelSpec, Param, Plan, PlanOptions, Unit};

/// One microbatch with every unit resharded, nothing ahead, and no replicas.
const PLAIN: &str = "g0 u0 g1 u1 g2 u2 g2' u2' r2 g1' u1' r1 g0' u0' r0";
/// What every microbatch does before its first reduction.
const FORWARD: &str = "g0 u0 g1 u1 g2 u2 g2' u2'";

fn three_units() -> ModelSpec {
    let unit = |name: &str| Unit::new(name).param(Param::new(format!("{name}.w"), [6]));
    ["a", "b", "c"].into_iter().fold(ModelSpec::new(), |spec, name| spec.unit(unit(name)))
}

/// The options of a plan, and the rules of its steps.
struct Settings {
    options: PlanOptions,
    rules: Rules,
}

/// Nothing ahead, the declared order from the first microbatch on.
fn plain() -> Settings {
    let options = PlanOptions { prefetch: 0, ..PlanOptions::default() };
    Settings { options, rules: Rules { order: UnitOrder::Error, ..Rules::default() } }
}

/// As [`plain`], with gathers `prefetch` units ahead.
fn ahead(prefetch: usize) -> Settings {
    let Settings { options, rules } = plain();
    Settings { options: PlanOptions { prefetch, ..options }, rules }
}

fn dry_run(mesh: [usize; 2], settings: Settings, microbatches: Option<usize>) -> DryRun {
    dry_run_of(three_units(), mesh, settings, microbatches)
}

fn dry_run_of(
    spec: ModelSpec,
    mesh: [usize; 2],
    settings: Settings,
    microbatches: Option<usize>,
) -> DryRun {
    let mesh = Mesh::new(mesh[0], mesh[1]).expect("a mesh");
    let plan = Plan::new(spec, mesh, settings.options).expect("a plan");
    DryRun::of(&Arc::new(plan), settings.rules, microbatches, 2)
}

/// The gathers, hand-outs, reduce-scatters and all-reduces of a step, a line for each microbatch
/// and its end.
fn order(mesh: [usize; 2], settings: Settings, microbatches: Option<usize>) -> String {
    order_of(&dry_run(mesh, settings, microbatches))
}

fn order_of(step: &DryRun) -> String {
    let words = |outputs: &Vec<Output>| -> Vec<String> {
        let words = outputs.iter().map(ToString::to_string);
        words.filter(|word| word.starts_with(['g', 'u', 'r', 'a'])).collect()
    };
    let parts = step.microbatches.iter().chain([&step.finish]).map(words);
    let lines: Vec<String> =
        parts.filter(|words| !words.is_empty()).map(|words| words.join(" ")).collect();
    lines.join("\n")
}

#[test]
fn a_step_is_written_in_words() {
    let expected = "opening       <headers>\n\
                    microbatch 0  g0 (g0) u0 g1 (g1) u1 g2 (g2) u2 <weights> g2' (g2') u2' r2 \
                    g1' (g1') u1' r1 g0' (g0') u0' r0\n\
                    finish        (r2) (r1) (r0) <statement>";
    assert_eq!(dry_run([1, 2], plain(), Some(1)).to_string(), expected);
}

#[test]
fn gathers_are_issued_when_they_or_those_before_them_are_needed() {
    let order_ahead = |prefetch| order([1, 2], ahead(prefetch), Some(1));
    assert_eq!(order_ahead(0), PLAIN);
    assert_eq!(order_ahead(1), "g0 g1 u0 g2 u1 g2' u2 g1' u2' r2 g0' u1' r1 u0' r0");
    assert_eq!(order_ahead(2), "g0 g1 g2 u0 g2' u1 g1' u2 g0' u2' r2 u1' r1 u0' r0");
    assert_eq!(order_ahead(100), "g0 g1 g2 g2' g1' g0' u0 u1 u2 u2' r2 u1' r1 u0' r0");
}

#[test]
fn nothing_is_gathered_ahead_across_microbatches() {
    let line = "g0 g1 g2 g2' g1' g0' u0 u1 u2 u2' r2 u1' r1 u0' r0";
    assert_eq!(order([1, 2], ahead(100), Some(2)), [line, line].join("\n"));
    assert_eq!(order([1, 2], plain(), Some(3)), [PLAIN, PLAIN, PLAIN].join("\n"));
}

#[test]
fn a_kept_unit_is_gathered_once_and_a_frozen_one_is_never_reduced() {
    let with_second = |change: fn(Unit) -> Unit| {
        let second = |unit: &Unit| match &*unit.name {
            "b" => change(unit.clone()),
            _ => unit.clone(),
        };
        let spec = three_units().units().iter().map(second).fold(ModelSpec::new(), ModelSpec::unit);
        order_of(&dry_run_of(spec, [1, 2], ahead(1), Some(1)))
    };
    assert_eq!(with_second(Unit::keep), "g0 g1 u0 g2 u1 g2' u2 g0' u2' r2 r1 u0' r0");
    let frozen = with_second(|_| Unit::new("b").param(Param::new("b.w", [6]).frozen()));
    assert_eq!(frozen, "g0 g1 u0 g2 u1 g2' u2 g1' u2' r2 g0' u1' u0' r0");
}

#[test]
fn nothing_is_gathered_ahead_while_the_order_is_found() {
    let rules = Rules { order: UnitOrder::Follow, ..Rules::default() };
    let first = "g0 u0 g1 u1 g2 u2 g2' g1' u2' r2 g0' u1' r1 u0' r0";
    let second = "g0 g1 u0 g2 u1 g2' u2 g1' u2' r2 g0' u1' r1 u0' r0";
    let found = order([1, 2], Settings { options: PlanOptions::default(), rules }, Some(2));
    assert_eq!(found, [first, second].join("\n"));
}

#[test]
fn all_reduces_start_in_the_last_microbatch_where_it_is_known() {
    let last = format!("{FORWARD} r2 a2 g1' u1' r1 a1 g0' u0' r0 a0");
    assert_eq!(order([2, 1], plain(), Some(2)), format!("{PLAIN}\n{last}"));
    assert_eq!(order([2, 2], plain(), None), format!("{PLAIN}\n{PLAIN}\na2 a1 a0"));
}

#[test]
fn in_one_sequence_an_all_reduce_follows_the_next_reduce_scatter() {
    let Settings { options, rules } = plain();
    let one = Settings { options, rules: Rules { sequences: Sequences::One, ..rules } };
    let last = format!("{FORWARD} r2 g1' u1' r1 a2 g0' u0' r0 a1\na0");
    assert_eq!(order([2, 2], one, Some(1)), last);
}

#[test]
fn modes_differ_in_the_microbatches_that_reduce() {
    let mode = |accumulation, microbatches| {
        let Settings { options, rules } = plain();
        let options = PlanOptions { accumulation, ..options };
        order([2, 2], Settings { options, rules }, microbatches)
    };
    let every = format!("{FORWARD} r2 g1' u1' r1 g0' u0' r0 a2 a1 a0");
    assert_eq!(mode(Accumulation::Every, Some(2)), format!("{every}\n{every}"));
    assert_eq!(mode(Accumulation::Every, None), format!("{every}\n{every}"));
    let first = format!("{FORWARD} g1' u1' g0' u0'");
    let last = format!("{FORWARD} r2 a2 g1' u1' r1 a1 g0' u0' r0 a0");
    assert_eq!(mode(Accumulation::Local, Some(2)), format!("{first}\n{last}"));
    assert_eq!(mode(Accumulation::Local, None), format!("{first}\n{first}\nr2 r1 r0 a2 a1 a0"));
}

/// No batch and no second end follows the sums, and the next evaluation may begin.
#[test]
fn the_exchange_of_sums_ends_an_evaluation() {
    let Settings { options, rules } = plain();
    let mesh = Mesh::new(1, 2).expect("a mesh");
    let plan = Plan::new(three_units(), mesh, options).expect("a plan");
    let mut machine = StepMachine::new(Arc::new(plan), rules);
    let batch = |own: Input| Some(Output::Exchange(Exchange::Batch(own)));
    let supply = |own: Input| {
        let supply = Supply::of([own, Input::Exhausted].into_iter());
        Conclusion::Batches(Batches { supply, gathers_again: false })
    };

    machine.evaluate(EvaluationKind::ForwardOnly).expect("no step is under way");
    machine.begin_batch().expect("an evaluation");
    assert_eq!(machine.poll(), batch(Input::Ready));
    machine.conclude(supply(Input::Ready)).expect("a batch");
    assert_eq!(machine.end_evaluation(), Err(Refused::Unfinished { microbatch: 0 }));
    machine.end_microbatch().expect("a batch is open");
    while let Some(output) = machine.poll() {
        if let Output::Await(operation) | Output::Follow(operation) = output {
            machine.done(operation).expect("the machine waits for it");
        }
    }

    machine.end_evaluation().expect("an evaluation");
    assert_eq!(machine.poll(), batch(Input::Exhausted));
    machine.conclude(supply(Input::Exhausted)).expect("no batch");
    assert_eq!(machine.poll(), Some(Output::Exchange(Exchange::Mean)));
    machine.conclude(Conclusion::Agreed).expect("sums");
    assert_eq!(machine.poll(), None);
    assert_eq!(machine.begin_batch(), Err(Refused::OutOfTurn { input: "begin_batch" }));
    assert_eq!(machine.end_evaluation(), Err(Refused::OutOfTurn { input: "end_evaluation" }));
    machine.evaluate(EvaluationKind::ForwardOnly).expect("no evaluation is under way");
}
