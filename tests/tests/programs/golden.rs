//! The program `golden`: it repeats a training by PyTorch, and names the number that differs.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use candle_core::{Device, Tensor, safetensors};
use hsdp_train::testing::{bounded, on_a_full_disk, refusal};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_golden");

const FILES: [&str; 4] =
    ["init.safetensors", "batches.safetensors", "final.safetensors", "expected.json"];

fn original() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_batchnorm")
}

/// A copy of the golden run.
fn copy() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    for name in FILES {
        fs::copy(original().join(name), folder.path().join(name)).expect("a copy");
    }
    folder
}

/// A copy whose recipe and results are changed.
fn with_expected(change: impl FnOnce(&mut Value)) -> TempDir {
    let folder = copy();
    let path = folder.path().join("expected.json");
    let mut expected = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    change(&mut expected);
    fs::write(&path, expected.to_string()).expect("a file");
    folder
}

/// A copy in whose file tensors are changed.
fn with_tensors(file: &str, change: impl FnOnce(&mut HashMap<String, Tensor>)) -> TempDir {
    let folder = copy();
    let path = folder.path().join(file);
    let mut tensors = safetensors::load(&path, &Device::Cpu).expect("tensors");
    change(&mut tensors);
    safetensors::save(&tensors, &path).expect("a file");
    folder
}

/// Adds to the first element of a tensor.
fn add(tensors: &mut HashMap<String, Tensor>, name: &str, by: f32) {
    let tensor = &tensors[name];
    let mut values: Vec<f32> = tensor.flatten_all().and_then(|it| it.to_vec1()).expect("f32");
    values[0] += by;
    let changed = Tensor::from_vec(values, tensor.dims(), &Device::Cpu).expect("one shape");
    tensors.insert(name.to_owned(), changed);
}

fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = bounded(PROGRAM);
    let output: Output =
        command.arg("batchnorm").arg(folder).args(arguments).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.is_empty(), "{error}");
    (output.status.code(), String::from_utf8(output.stdout).expect("UTF-8"))
}

#[test]
fn a_run_that_agrees_succeeds() {
    for arguments in [&[][..], &["--mesh", "1x2"], &["--mesh", "2x1", "--recompute"]] {
        let (code, said) = run(&original(), arguments);
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 6, "{said}");
        for kind in ["losses: ", "gradient norms: ", "held-out losses: ", "running statistics: "] {
            assert!(said.lines().any(|line| line.starts_with(kind)), "no {kind} in {said}");
        }
    }
}

/// The number that differs most is in the last line.
#[test]
fn a_number_that_differs_is_named() {
    let changed = |pointer: &'static str, by: f64| {
        with_expected(|expected| {
            let number = expected.pointer_mut(pointer).expect("a number");
            *number = (number.as_f64().expect("a number") + by).into();
        })
    };
    let tensor = |name: &'static str, by: f32| {
        with_tensors("final.safetensors", |tensors| add(tensors, name, by))
    };
    for (folder, kind, place) in [
        (changed("/losses/3", 1e-4), "losses: ", "at step 3: "),
        (changed("/losses/9", -1e-4), "losses: ", "at step 9: "),
        (changed("/grad_norms/2", 1e-3), "gradient norms: ", "at step 2: "),
        (changed("/eval_loss_before", 1e-4), "held-out losses: ", "at the begin: "),
        (changed("/eval_loss_after", 1e-4), "held-out losses: ", "at the end: "),
        (tensor("bn1.running_mean", 1e-4), "running statistics: ", "at bn1.running_mean[0]: "),
        (tensor("bn2.running_var", -1e-4), "running statistics: ", "at bn2.running_var[0]: "),
        (tensor("bn3.running_var", f32::NAN), "running statistics: ", "at bn3.running_var[0]: "),
    ] {
        let (code, said) = run(folder.path(), &["--mesh", "1x2"]);
        assert_eq!(code, Some(1), "{kind} {place}: {said}");
        let last = said.lines().last().expect("a line");
        assert!(last.starts_with(kind) && last.contains(place), "{kind} {place}: {said}");
    }
}

/// Another recipe, other data or other initial values give other losses.
#[test]
fn what_a_run_begins_with_counts() {
    let recipe = |name: &'static str, value: Value| {
        with_expected(|expected| expected["recipe"][name] = value)
    };
    for (what, folder) in [
        ("learning rate", recipe("learning_rate", 0.0049.into())),
        ("betas", recipe("betas", vec![0.9, 0.99].into())),
        ("weight decay", recipe("weight_decay", 0.1.into())),
        ("clip", recipe("clip", 0.5.into())),
        ("momentum", with_expected(|expected| expected["sizes"]["momentum"] = 0.11.into())),
        ("eps", with_expected(|expected| expected["sizes"]["eps"] = 1e-3.into())),
        ("images", with_tensors("batches.safetensors", |it| add(it, "images", 1.0))),
        ("held-out images", with_tensors("batches.safetensors", |it| add(it, "eval_images", 1.0))),
        ("weights", with_tensors("init.safetensors", |it| add(it, "conv2.weight", 0.01))),
        ("norms", with_tensors("init.safetensors", |it| add(it, "bn1.weight", 0.01))),
        ("statistics", with_tensors("init.safetensors", |it| add(it, "bn1.running_var", 0.01))),
    ] {
        let (code, said) = run(folder.path(), &[]);
        assert_eq!(code, Some(1), "{what}: {said}");
    }
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let refused = |folder: &Path, arguments: &[&str]| {
        refusal(bounded(PROGRAM).arg("batchnorm").arg(folder).args(arguments))
    };
    for name in FILES {
        let folder = copy();
        let path = folder.path().join(name);
        fs::remove_file(&path).expect("it is there");
        let missing = refused(folder.path(), &[]);
        let path = path.display().to_string();
        assert!(missing.contains(&path), "{missing}");
        let whole = fs::read(original().join(name)).expect("a file");
        fs::write(&path, &whole[..whole.len() / 2]).expect("a file");
        let broken = refused(folder.path(), &[]);
        assert!(broken.contains(&path), "{broken}");
        assert_ne!(broken, missing);
    }
    let expected = |change: fn(&mut Value)| with_expected(change);
    let without = |file: &'static str, name: &'static str| {
        with_tensors(file, |tensors| drop(tensors.remove(name).expect("it is there")))
    };
    for (folder, phrase) in [
        (
            expected(|it| it["recipe"]["optimizer"] = "sgd".into()),
            "expected.json: optimizer sgd, and adamw is known",
        ),
        (
            expected(|it| drop(it["losses"].as_array_mut().expect("a list").pop())),
            "expected.json: 9 losses of 10 steps",
        ),
        (expected(|it| it["recipe"]["steps"] = 11.into()), "expected.json: 10 losses of 11 steps"),
        (
            expected(|it| drop(it["grad_norms"].as_array_mut().expect("a list").pop())),
            "expected.json: 9 grad_norms of 10 steps",
        ),
        (
            expected(|it| drop(it.as_object_mut().expect("a map").remove("eval_loss_after"))),
            "missing field `eval_loss_after`",
        ),
        (
            without("batches.safetensors", "eval_labels"),
            "batches.safetensors has no tensor eval_labels",
        ),
        (without("init.safetensors", "bn2.weight"), "init.safetensors has no tensor bn2.weight"),
        (
            without("final.safetensors", "bn2.running_var"),
            "final.safetensors has no tensor bn2.running_var",
        ),
    ] {
        let error = refused(folder.path(), &[]);
        assert!(error.contains(phrase), "{error}");
    }
    let error = refused(&original(), &["--mesh", "60000x60000"]);
    assert!(error.contains("3600000000 ranks"), "{error}");
    let error = refused(Path::new("no such folder"), &[]);
    assert!(error.contains("no such folder"), "{error}");
    assert!(refusal(&mut bounded(PROGRAM)).contains("a command is missing"));
    assert!(refused(&original(), &["--colour", "blue"]).contains("--colour"));
}

#[test]
fn a_full_disk_is_one_line_and_no_success() {
    let output = on_a_full_disk(bounded(PROGRAM).arg("batchnorm").arg(original()));
    let output = output.expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.contains("cannot print to stdout: No space left"), "{error}");
}
