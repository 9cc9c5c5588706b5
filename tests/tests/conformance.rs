//! The conformance cases in `cases`, cases made by chance, and the runner as a program.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use hsdp::Mesh;
use hsdp_tests::conformance::{Case, CaseParam, MOST_RANKS, ReduceCase, TrainCase, Verdict};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// Cases that are made by chance.
const GENERATED: u64 = 1000;

fn cases_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cases")
}

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
    let (mut passed, mut failures) = (0, Vec::new());
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

/// What is expected of a step does not depend on who computes which of its sequences.
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

/// Chance must reach every corner, or the test above says less than it seems to.
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

fn conformance(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_conformance");
    Command::new(program)
        .args(arguments)
        .current_dir(cases_folder())
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program prints UTF-8")
}

fn text_lines(bytes: &[u8]) -> Vec<String> {
    text(bytes).lines().map(str::to_owned).collect()
}

#[test]
fn the_program_prints_a_line_a_case_and_a_count() {
    let output =
        conformance(&["integers-2x2-local", "vjp-scatter-2", "mlp-2x2-reduce_scatter-f16"]);
    let lines = text_lines(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{lines:?}");
    assert_eq!(lines[0], "ok    integers-2x2-local          exact (122 elements)");
    assert!(lines[1].starts_with("ok    vjp-scatter-2               worst 0."), "{lines:?}");
    assert!(lines[2].starts_with("ok    mlp-2x2-reduce_scatter-f16  worst 0."), "{lines:?}");
    assert!(lines[2].contains(" of bound ("), "{lines:?}");
    assert_eq!(lines[3], "3 passed, 0 failed, 0 skipped");
}

#[test]
fn a_case_with_too_many_ranks_is_skipped() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = cases_folder().join("vjp-thread-a1").join("case.json");
    let text = fs::read_to_string(source).expect("the case");
    let mut case: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let ranks = MOST_RANKS + 1;
    case["world"] = ranks.into();
    for field in ["inputs", "cotangents", "expected_outputs", "expected_input_gradients"] {
        case[field] = vec![case[field][0].clone(); ranks].into();
    }
    fs::write(folder.path().join("case.json"), case.to_string()).expect("written");

    let output = conformance(&[folder.path().to_str().expect("UTF-8"), "vjp-thread-a1"]);
    let printed = text_lines(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed:?}");
    assert_eq!(printed[0], "skip  vjp-thread-a1  129 ranks: 128 threads are the most");
    assert_eq!(printed[2], "1 passed, 0 failed, 1 skipped");
}

#[test]
fn a_wrong_expectation_fails_the_case_and_names_the_element() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = cases_folder().join("integers-2x2-local");
    for file in ["case.json", "gradients.safetensors"] {
        fs::copy(source.join(file), folder.path().join(file)).expect("a copy");
    }
    let bytes = fs::read(source.join("expected.safetensors")).expect("the expectation");
    let mut expected = tensors(&bytes);
    expected.get_mut("0.weight").expect("a tensor").1[17] += 0.25;
    write_tensors(&folder.path().join("expected.safetensors"), &expected);

    let output = conformance(&[folder.path().to_str().expect("UTF-8"), "integers-2x2-every"]);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.starts_with("FAIL  integers-2x2-local  0.weight[17]: got "), "{printed}");
    assert!(printed.ends_with("1 passed, 1 failed, 0 skipped\n"), "{printed}");
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(bytes: &[u8]) -> Tensors {
    let file = SafeTensors::deserialize(bytes).expect("a file of tensors");
    let values =
        |data: &[u8]| data.as_chunks::<4>().0.iter().copied().map(f32::from_le_bytes).collect();
    file.iter()
        .map(|(name, view)| (name.to_owned(), (view.shape().to_vec(), values(view.data()))))
        .collect()
}

fn write_tensors(path: &Path, tensors: &Tensors) {
    let bytes: BTreeMap<&String, Vec<u8>> = tensors
        .iter()
        .map(|(name, (_, values))| {
            (name, values.iter().flat_map(|value| value.to_le_bytes()).collect())
        })
        .collect();
    let views = tensors.iter().map(|(name, (shape, _))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), &bytes[name])
            .expect("as many as the shape says");
        (name.clone(), view)
    });
    safetensors::serialize_to_file(views, None, path).expect("the file is written");
}

#[test]
fn what_makes_no_sense_is_one_line_and_exit_code_2() {
    let broken = tempfile::tempdir().expect("a temporary folder");
    fs::write(broken.path().join("case.json"), r#"{"kind": "reduce", "name": "broken"}"#)
        .expect("written");
    let strange = tempfile::tempdir().expect("a temporary folder");
    fs::write(strange.path().join("case.json"), r#"{"kind": "dance", "name": "strange"}"#)
        .expect("written");
    let misdealt = tempfile::tempdir().expect("a temporary folder");
    let case = r#"{"kind": "vjp", "name": "misdealt", "op": "scatter", "world": 2, "root": 0, "inputs": [[1], [2]],
        "cotangents": [[1], [1]], "expected_outputs": [[1], [1]], "expected_input_gradients": [[1], [1]]}"#;
    fs::write(misdealt.path().join("case.json"), case).expect("written");
    let [broken, strange, misdealt] =
        [&broken, &strange, &misdealt].map(|folder| folder.path().to_str().expect("UTF-8"));
    let refused: [(&[&str], &str); 9] = [
        (&[], "<CASE_DIR>"),
        (&["--comm", "mpi", "vjp-scatter-2"], "--comm mpi"),
        (&["--comm", "nccl", "vjp-scatter-2"], "--comm nccl"),
        (&["--comm", "smoke", "vjp-scatter-2"], "smoke"),
        (&["--device", "cuda", "vjp-scatter-2"], "--device cuda"),
        (&["vjp-scatter-2", "nowhere"], "nowhere/case.json"),
        (&[broken], "missing field `mesh`"),
        (&[strange], "kind `dance`"),
        (&[misdealt], "inputs have 1 elements: op `scatter` deals them to 2 ranks"),
    ];
    for (arguments, named) in refused {
        let output = conformance(arguments);
        let (printed, said) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
        assert!(said.contains(named), "{arguments:?}: {said}");
        assert!(printed.is_empty(), "{arguments:?}: {printed}");
    }
}
