//! Every case in `tests/cases`, and cases made at random.

use std::fs;
use std::path::PathBuf;

use hsdp::Mesh;
use hsdp_tests::conformance::{Case, CaseParam, ReduceCase, TrainCase, Verdict};

use crate::conformance::cases_folder;

/// Cases that are made at random.
const GENERATED: u64 = 1000;

/// All case folders whose cases pass `wanted`, in order of their names.
fn cases(wanted: impl Fn(&Case) -> bool) -> Vec<Case> {
    let entries = fs::read_dir(cases_folder()).expect("the folder of cases");
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    let cases = folders.iter().map(|folder| Case::read(folder).expect("the case can be read"));
    cases.filter(wanted).collect()
}

/// Runs cases and fails with all that failed; gives how many passed.
fn assert_all_pass<'a>(verdicts: impl Iterator<Item = (&'a str, Verdict)>) -> usize {
    let mut passed = 0;
    let mut failures = Vec::new();
    for (name, verdict) in verdicts {
        match verdict {
            Verdict::Passed(_) => passed += 1,
            Verdict::Failed(_) | Verdict::Skipped(_) => failures.push(format!("{name}: {verdict}")),
        }
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
    passed
}

#[test]
fn every_reduce_case_passes() {
    let cases = cases(|case| matches!(case, Case::Reduce(_)));
    assert_eq!(assert_all_pass(cases.iter().map(|case| (case.name(), case.run()))), 42);
}

#[test]
fn the_train_case_on_2x2_passes() {
    train("train-2x2-f32");
}

#[test]
fn the_train_case_on_4x1_passes() {
    train("train-4x1-f32");
}

#[test]
fn the_train_case_on_1x4_in_bf16_passes() {
    train("train-1x4-bf16");
}

fn train(name: &str) {
    let case = Case::read(&cases_folder().join(name)).expect("the case can be read");
    let verdict = case.run();
    assert!(matches!(verdict, Verdict::Passed(_)), "{name}: {verdict}");
}

/// Replicas, shards, and microbatches of a step.
type Hands = (usize, usize, usize);

/// The expected result of a step does not depend on the ranks that compute its sequences.
#[test]
fn train_cases_pass_with_their_sequences_in_other_hands() {
    // Only one in bf16, which candle computes slowly.
    let hands: [(&str, &[Hands]); 3] = [
        ("train-4x1-f32", &[(1, 1, 1), (2, 2, 1), (2, 4, 2)]),
        ("train-2x2-f32", &[(1, 4, 3), (2, 3, 4), (3, 2, 1)]),
        ("train-1x4-bf16", &[(2, 2, 3)]),
    ];
    for (name, others) in hands {
        let regrouped = others.iter().map(|&(replicate, shard, microbatches)| {
            let case = TrainCase::read(&cases_folder().join(name)).expect("the case can be read");
            case.regrouped(Mesh::new(replicate, shard).expect("a mesh"), microbatches)
        });
        let regrouped: Vec<TrainCase> = regrouped.collect();
        assert_all_pass(regrouped.iter().map(|case| (case.name(), case.run())));
    }
}

#[test]
fn there_is_a_test_for_every_train_case() {
    assert_eq!(cases(|case| matches!(case, Case::Train(_))).len(), 3);
}

#[test]
fn every_vjp_case_passes() {
    let cases = cases(|case| matches!(case, Case::Vjp(_)));
    assert_eq!(assert_all_pass(cases.iter().map(|case| (case.name(), case.run()))), 37);
}

#[test]
fn generated_cases_pass() {
    let cases: Vec<ReduceCase> = (0..GENERATED).map(ReduceCase::generated).collect();
    assert_all_pass(cases.iter().map(|case| (case.name.as_str(), case.run())));
}

/// The generator must reach every corner, or the test above says less than it seems to.
#[test]
fn generated_cases_reach_every_corner() {
    let cases: Vec<ReduceCase> = (0..GENERATED).map(ReduceCase::generated).collect();
    let at_least_five = |what: &str, reaches: &dyn Fn(&ReduceCase) -> bool| {
        let reached = cases.iter().filter(|case| reaches(case)).count();
        assert!(reached >= 5, "{what} is tried {reached} times");
    };
    at_least_five("an exact result", &|case| case.exact);
    at_least_five("a divide factor", &|case| case.divide_factor.is_some());
    at_least_five("a world of 8 ranks", &|case| case.mesh.world_size() == 8);
    at_least_five("an odd mesh", &|case| !case.mesh.world_size().is_power_of_two());
    at_least_five("an empty shard", &has_empty_shard);
    at_least_five("a scalar", &|case| has_parameter(case, |param| param.shape.is_empty()));
    at_least_five("three dims", &|case| has_parameter(case, |param| param.shape.len() == 3));
    at_least_five("a parameter without any gradient", &|case| {
        has_parameter(case, |param| param.used_in.as_ref().is_some_and(Vec::is_empty))
    });
    let mut combinations: Vec<_> = cases
        .iter()
        .map(|case| (case.accumulation.name(), case.reduce_dtype, case.param_dtype))
        .collect();
    combinations.sort_unstable();
    combinations.dedup();
    assert_eq!(combinations.len(), 27, "every mode with every pair of dtypes");
}

fn has_parameter(case: &ReduceCase, wanted: impl Fn(&CaseParam) -> bool) -> bool {
    case.parameters().any(|(_, param)| wanted(param))
}

/// Whether the last rank of a shard group holds nothing of some unit that is reduced.
fn has_empty_shard(case: &ReduceCase) -> bool {
    case.units.iter().any(|unit| {
        let elements = |trainable: bool| {
            let params = unit.iter().filter(|param| param.trainable == trainable);
            params
                .map(|param| param.shape.iter().product::<usize>().next_multiple_of(32))
                .sum::<usize>()
        };
        let slices = elements(true).div_ceil(32);
        slices > 0 && slices < case.mesh.shard_size()
    })
}
