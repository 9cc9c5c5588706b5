//! The runner as a program: its output, its exit codes, and the cases that it refuses.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use hsdp_tests::conformance::MOST_RANKS;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::conformance::cases_folder;

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
    assert_eq!(
        printed[0],
        "skip  vjp-thread-a1  129 ranks: at most 128 run as threads of one process"
    );
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
        let printed = text(&output.stdout);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
        assert!(said.contains(named), "{arguments:?}: {said}");
        assert!(printed.is_empty(), "{arguments:?}: {printed}");
    }
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
