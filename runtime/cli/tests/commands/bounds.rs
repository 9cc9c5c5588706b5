//! The program with limits on time and memory: files that never end, JSON that is deep or huge, and
//! full disks.

use std::fs::{self, File};
use std::process::Command;

use hsdp_train::testing::{bounded, on_a_full_disk, refusal};
use serde_json::json;

use crate::folder::Folder;
use crate::program::output;

/// Returns a command of `hsdp` with limits on its time and memory.
pub(crate) fn limited(arguments: &[&str]) -> Command {
    let mut command = bounded(env!("CARGO_BIN_EXE_hsdp"));
    command.args(arguments);
    command
}

/// Returns the error of a command with a file as its argument, without the file's path.
fn refused(command: &str, file: &str) -> String {
    let rest: &[&str] = if command == "plan" { &["--mesh", "1x2"] } else { &[] };
    let error = refusal(&mut limited(&[&[command, file], rest].concat()));
    let named = format!("hsdp: {file}: ");
    error.strip_prefix(&named).unwrap_or_else(|| panic!("{named} begins no {error}")).to_owned()
}

#[test]
fn only_regular_files_of_bounded_length_are_read() {
    let folder = Folder::new();
    let [fifo, huge] = ["rank-0.json", "huge.json"].map(|name| folder.at(name));
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("it starts").success());
    for (command, most) in [("plan", 16 << 20), ("check", 64 << 20), ("trace", 64 << 20)] {
        let problem = "it is a FIFO; a regular file is needed\n";
        assert_eq!(refused(command, &fifo), problem);
        let problem = "it is a device; a regular file is needed\n";
        assert_eq!(refused(command, "/dev/zero"), problem);
        File::create(&huge).and_then(|file| file.set_len(most + 1)).expect("a hole");
        assert_eq!(refused(command, &huge), format!("it has more than {most} bytes\n"));
    }
    fs::create_dir(folder.at("config.json")).expect("a folder");
    let model = folder.name();
    let error = refusal(&mut limited(&["plan", &model, "--mesh", "1x2"]));
    let problem = "config.json: it is a directory; a regular file is needed";
    assert_eq!(error, format!("hsdp: {model}/{problem}\n"));
    // A folder has records by their names.
    for command in ["check", "trace"] {
        let error = refusal(&mut limited(&[command, &model]));
        let problem = "/rank-0.json: it is a FIFO; a regular file is needed\n";
        assert!(error.ends_with(problem), "{error}");
    }
}

/// Seventeen records of almost 64 MiB, all of them spaces.
#[test]
fn all_records_together_are_bounded() {
    let folder = Folder::new();
    let record = r#"{"version": 1, "rank": 0, "size": 1, "step": 0, "epoch": 0,
        "began_unix_us": 0, "taken_ns": 0, "overwritten": 0, "groups": [], "entries": []}"#;
    let path = folder.file("record.json", &(record.to_owned() + &" ".repeat((64 << 20) - 300)));
    let error = refusal(&mut limited(&[&["trace"], &[&*path; 17][..]].concat()));
    assert!(error.ends_with("all records together have at most 1073741824\n"), "{error}");
}

#[test]
fn deep_and_wide_json_is_refused() {
    let folder = Folder::new();
    let deep = "[".repeat(8 << 20);
    let wide = r#"{"name":"u","params":[]},"#.repeat(600_000);
    for (command, text, problem) in [
        ("plan", deep.clone(), "invalid type: sequence"),
        ("plan", format!(r#"{{"units": {deep}"#), "invalid type: sequence"),
        (
            "plan",
            format!(r#"{{"units": [{}]}}"#, wide.trim_end_matches(',')),
            "at most 10000 are planned",
        ),
        ("check", deep.clone(), "invalid type: sequence"),
        ("check", format!(r#"{{"mesh": {deep}"#), "EOF while parsing a list"),
        (
            "check",
            format!(r#"{{"schedules": [{}[]]}}"#, "[],".repeat(20 << 20)),
            "schedules: more than 1048576 ranks",
        ),
        ("trace", format!(r#"{{"version": 1, "rank": {deep}"#), "not a flight record: "),
        ("trace", format!(r#"{{"version": 1, "more": {deep}"#), "not a flight record: "),
    ] {
        let error = refused(command, &folder.file("file.json", &text));
        assert!(error.contains(problem), "{command}: {error}");
    }
}

/// The sizes in `config.json` reach the bounds, or exceed them.
#[test]
fn the_sizes_of_a_decoder_are_bounded() {
    let folder = Folder::new();
    let write = |family: &str, [layers, heads, size]: [u64; 3], width: u64| {
        let config = json!({
            "model_type": family, "num_hidden_layers": layers, "hidden_size": width,
            "intermediate_size": width, "vocab_size": width, "num_attention_heads": heads,
            "num_key_value_heads": heads, "head_dim": size, "pad_token_id": null,
        });
        folder.file("model.json", &config.to_string())
    };
    for (family, sizes, width, problem) in [
        (
            "gemma2",
            [10_000, 1 << 23, 2],
            1 << 24,
            "unit `model.layers.0` takes 1970324904083456 elements",
        ),
        ("qwen3", [10_001, 4, 16], 64, "num_hidden_layers is 10001: it must be from 1 to 10000"),
        (
            "qwen3",
            [2, 1 << 24, 1 << 24],
            64,
            "head_dim is 16777216: it must be at most 16777216 by",
        ),
        ("qwen3", [2, 4, 16], 1 << 25, "vocab_size is 33554432: it must be from 1 to 16777216"),
    ] {
        let error = refused("plan", &write(family, sizes, width));
        assert!(error.starts_with(problem), "{error}");
    }
    let path = write("llama", [10_000, 4, 16], 64);
    let plan = ["plan", &path, "--mesh", "1x2"];
    let step = ["simulate", &path, "--mesh", "1x2", "--machine", "h100-cluster"];
    for arguments in [&plan[..], &step] {
        let (code, _, error) = output(&mut limited(arguments));
        assert_eq!((code, &*error), (Some(0), ""), "{arguments:?}");
    }
    // Keys without effect may have any value, of 16 MiB.
    let wide = format!(r#"{{"model_type": "llama", "id2label": [{}[]]}}"#, "[],".repeat(5_500_000));
    folder.file("model.json", &wide);
    let (code, _, error) = output(&mut limited(&plan));
    assert_eq!(code, Some(0), "{error}");
}

#[test]
fn a_full_disk_is_one_line_and_no_success() {
    for arguments in [
        &["plan", "gpt2-small", "--mesh", "1x2"][..],
        &["plan", "gpt2-small", "--mesh", "1x2", "--json"],
        &["doctor"],
        &["completions", "bash"],
        &["--help"],
        &["--version"],
    ] {
        let output = on_a_full_disk(&mut limited(arguments)).expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        let expected = "hsdp: cannot print to stdout: No space left on device (os error 28)\n";
        assert_eq!((output.status.code(), &*error), (Some(2), expected), "{arguments:?}");
    }
}

#[test]
fn a_missing_command_is_named() {
    for arguments in [&[][..], &["checkpoint"]] {
        let error = refusal(&mut limited(arguments));
        assert_eq!(error, "hsdp: a command is missing; --help lists them\n", "{arguments:?}");
    }
}
