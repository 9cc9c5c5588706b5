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

/// Nothing ahead, the declared order from the first microbatch on.
fn plain() -> (PlanOptions, Rules) {
    let options = PlanOptions { prefetch: 0, ..PlanOptions::default() };
    (options, Rules { order: UnitOrder::Error, ..Rules::default() })
}

fn dry_run(mesh: [usize; 2], options: (PlanOptions, Rules), microbatches: Option<usize>) -> DryRun {
    let mesh = Mesh::new(mesh[0], mesh[1]).expect("a mesh");
    let plan = Plan::new(three_units(), mesh, options.0).expect("a plan");
    DryRun::of(&Arc::new(plan), options.1, microbatches, 2)
}

/// The gathers, hand-outs, reduce-scatters and all-reduces of a step, a line for each microbatch
/// and its end.
fn order(mesh: [usize; 2], options: (PlanOptions, Rules), microbatches: Option<usize>) -> String {
    let step = dry_run(mesh, options, microbatches);
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
    let ahead = |prefetch| {
        let (options, rules) = plain();
        order([1, 2], (PlanOptions { prefetch, ..options }, rules), Some(1))
    };
    assert_eq!(ahead(0), PLAIN);
    assert_eq!(ahead(1), "g0 g1 u0 g2 u1 g2' u2 g1' u2' r2 g0' u1' r1 u0' r0");
    assert_eq!(ahead(2), "g0 g1 g2 u0 g2' u1 g1' u2 g0' u2' r2 u1' r1 u0' r0");
    assert_eq!(ahead(100), "g0 g1 g2 g2' g1' g0' u0 u1 u2 u2' r2 u1' r1 u0' r0");
}

#[test]
fn nothing_is_gathered_ahead_while_the_order_is_found() {
    let rules = Rules { order: UnitOrder::Follow, ..Rules::default() };
    let first = "g0 u0 g1 u1 g2 u2 g2' g1' u2' r2 g0' u1' r1 u0' r0";
    let second = "g0 g1 u0 g2 u1 g2' u2 g1' u2' r2 g0' u1' r1 u0' r0";
    let found = order([1, 2], (PlanOptions::default(), rules), Some(2));
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
    let (options, rules) = plain();
    let one = (options, Rules { sequences: Sequences::One, ..rules });
    let last = format!("{FORWARD} r2 g1' u1' r1 a2 g0' u0' r0 a1\na0");
    assert_eq!(order([2, 2], one, Some(1)), last);
}

#[test]
fn modes_differ_in_the_microbatches_that_reduce() {
    let mode = |accumulation, microbatches| {
        let (options, rules) = plain();
        let options = PlanOptions { accumulation, ..options };
        order([2, 2], (options, rules), microbatches)
    };
    let every = format!("{FORWARD} r2 g1' u1' r1 g0' u0' r0 a2 a1 a0");
    assert_eq!(mode(Accumulation::Every, Some(2)), format!("{every}\n{every}"));
    let first = format!("{FORWARD} g1' u1' g0' u0'");
    let last = format!("{FORWARD} r2 a2 g1' u1' r1 a1 g0' u0' r0 a0");
    assert_eq!(mode(Accumulation::Local, Some(2)), format!("{first}\n{last}"));
    assert_eq!(mode(Accumulation::Local, None), format!("{first}\n{first}\nr2 r1 r0 a2 a1 a0"));
}
