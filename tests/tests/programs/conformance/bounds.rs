//! The runner with limits on time and memory: cases that no machine can run, files that never end,
//! full disks.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use hsdp_train::testing::{bounded, on_a_full_disk, refusal};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::conformance::cases_folder;

fn conformance(folder: &Path) -> Command {
    let mut command = bounded(env!("CARGO_BIN_EXE_conformance"));
    command.arg(folder);
    command
}

/// The error of a copy of a case after a change of its `case.json`.
fn refused(case: &str, change: impl FnOnce(&mut Value)) -> String {
    let folder = TempDir::new().expect("a folder");
    let source = cases_folder().join(case);
    for entry in fs::read_dir(&source).expect("a case") {
        let file = entry.expect("a file");
        fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
    }
    let path = folder.path().join("case.json");
    let mut described = serde_json::from_slice(&fs::read(&path).expect("a case")).expect("JSON");
    change(&mut described);
    fs::write(&path, described.to_string()).expect("written");
    refusal(&mut conformance(folder.path()))
}

#[test]
fn sizes_of_64_bits_are_refused() {
    for (field, problem) in [
        ("microbatches", "microbatches is 18446744073709551615: expected 1 to 1024"),
        ("steps", "expected.loss has"),
        ("batch", "of memory are needed"),
    ] {
        let error = refused("train-2x2-f32", |case| case[field] = u64::MAX.into());
        assert!(error.contains(problem), "{field}: {error}");
    }
    for (field, problem) in [
        ("layers", "the most is 10000"),
        ("width", "the most is 16777216"),
        ("context", "the most is 16777216"),
        ("vocab", "the most is 16777216"),
        ("heads", "the most is 16777216"),
    ] {
        let error = refused("train-2x2-f32", |case| case["model"][field] = u64::MAX.into());
        assert!(error.contains(problem), "{field}: {error}");
    }
    let error = refused("train-2x2-f32", |case| case["model"]["context"] = (1 << 20).into());
    assert!(error.contains("of memory are needed"), "{error}");
}

#[test]
fn a_frozen_table_that_memory_does_not_hold_is_refused() {
    for (shape, problem) in [
        (json!([1 << 20, 1 << 12]), "of memory are needed"),
        (json!([u64::MAX, 2]), "elements with its padding, more than"),
    ] {
        let error = refused("integers-2x2-local", |case| {
            let units = case["units"].as_array_mut().expect("units");
            units.push(json!([{ "name": "table", "shape": shape, "trainable": false }]));
        });
        assert!(error.contains(problem), "{error}");
    }
}

#[test]
fn lists_are_bounded() {
    let error = refused("integers-2x2-local", |case| case["microbatches"] = u64::MAX.into());
    assert!(error.contains("expected 1 to 1024"), "{error}");
    let error = refused("integers-2x2-local", |case| {
        case["units"][0][0]["used_in"] = vec![0; 100_000].into();
    });
    assert!(error.contains("used_in has 100000 microbatches"), "{error}");
    let error =
        refused("integers-2x2-local", |case| case["units"] = vec![json!([]); 10_001].into());
    assert!(error.contains("units has 10001 units: the most is 10000"), "{error}");
}

#[test]
fn only_regular_files_of_bounded_length_are_read() {
    let folder = TempDir::new().expect("a folder");
    let case = folder.path().join("case.json");
    assert!(Command::new("mkfifo").arg(&case).status().expect("it starts").success());
    let error = refusal(&mut conformance(folder.path()));
    assert!(error.contains("case.json: it is a FIFO"), "{error}");
    fs::remove_file(&case).expect("there");
    File::create(&case).and_then(|file| file.set_len(1 << 40)).expect("a hole");
    let error = refusal(&mut conformance(folder.path()));
    assert!(error.contains("case.json: it has more than 4194304 bytes"), "{error}");

    let source = cases_folder().join("integers-2x2-local");
    fs::copy(source.join("case.json"), &case).expect("a copy");
    let tensors = folder.path().join("gradients.safetensors");
    std::os::unix::fs::symlink("/dev/zero", &tensors).expect("a link");
    let error = refusal(&mut conformance(folder.path()));
    assert!(error.contains("gradients.safetensors: it is a device"), "{error}");
}

#[test]
fn deep_json_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let deep = format!(r#"{{"kind": "vjp", "inputs": {}"#, "[".repeat(1 << 20));
    fs::write(folder.path().join("case.json"), deep).expect("written");
    let error = refusal(&mut conformance(folder.path()));
    assert!(error.contains("case.json: "), "{error}");
}

#[test]
fn a_full_disk_is_one_line_and_no_success() {
    let case = cases_folder().join("vjp-scatter-2");
    let soak = || bounded(env!("CARGO_BIN_EXE_soak"));
    let mut shown = soak();
    shown.args(["--show", "0x7"]);
    let mut soaked = soak();
    soaked.args(["--steps", "1"]);
    for mut command in [conformance(&case), conformance(Path::new("--help")), shown, soaked] {
        let output = on_a_full_disk(&mut command).expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{command:?}: {error}");
        assert!(error.contains("cannot print to stdout: No space left"), "{command:?}: {error}");
    }
    let error = refusal(soak().args(["--steps", "many"]));
    assert!(error.contains("invalid value 'many'"), "{error}");
}
