//! The examples as programs, with limits on time and memory: huge sizes, files that never end, full
//! disks.
use std::fs::{self, File};
use std::process::Command;

use hsdp_train::testing::{bounded, example, on_a_full_disk, refusal};
use tempfile::TempDir;

/// The largest number of 64 bits.
const MOST: &str = "18446744073709551615";

/// A model that trains in no time.
const SMALL: [&str; 10] =
    ["--mesh", "1x1", "--layers", "1", "--width", "8", "--heads", "2", "--context", "8"];

fn refused(program: &str, arguments: &[&str]) -> String {
    refusal(bounded(example(program)).args(arguments))
}

#[test]
fn numbers_of_64_bits_are_refused_with_their_bound() {
    for (program, option, most) in [
        ("train_gpt", "--batch", "from 1 to 16777216"),
        ("train_gpt", "--layers", "from 1 to 10000"),
        ("train_gpt", "--width", "from 1 to 16777216"),
        ("train_gpt", "--heads", "from 1 to 16777216"),
        ("train_gpt", "--context", "from 1 to 16777216"),
        ("train_gpt", "--microbatches", "from 1 to 65536"),
        ("train_gpt", "--steps", "from 1 to 1000000000"),
        ("train_gpt", "--prefetch", "from 0 to 10000"),
        ("finetune", "--batch", "from 1 to 16777216"),
        ("finetune", "--context", "from 1 to 16777216"),
        ("finetune", "--lora", "from 1 to 16777216"),
        ("finetune", "--steps", "from 1 to 1000000000"),
        ("contrastive", "--batch", "from 1 to 16777216"),
        ("contrastive", "--width", "from 1 to 16777216"),
        ("contrastive", "--steps", "from 1 to 1000000000"),
        ("contrastive", "--ranks", "at most 64 run as threads"),
    ] {
        let error = refused(program, &[option, MOST]);
        assert!(error.contains(most), "{program} {option}: {error}");
    }
}

/// Each size is allowed, and needs more memory than the process has.
#[test]
fn sizes_that_memory_does_not_hold_are_refused_with_the_largest_part() {
    let huge = "16777216";
    for (program, arguments, part) in [
        ("train_gpt", &["--batch", huge][..], "for activations"),
        ("train_gpt", &["--context", "100000", "--layers", "4"], "for activations"),
        ("train_gpt", &["--width", "4096", "--layers", "40"], "for the sharded model"),
        ("train_gpt", &["--width", huge], "elements with its padding, more than 281474976710656"),
        (
            "train_gpt",
            &["--batch", huge, "--context", "1024", "--microbatches", "65536", "--mesh", "8x8"],
            "at most 9007199254740992 tokens",
        ),
        ("train_gpt", &["--steps", "1000000000"], "for a record of each step"),
        ("finetune", &["--lora", huge], "for the sharded model"),
        ("finetune", &["--steps", "1000000000"], "for a record of each step"),
        ("contrastive", &["--width", huge], "for the parameters of each rank"),
        ("contrastive", &["--batch", huge], "for the comparison of all pairs"),
        ("contrastive", &["--steps", "1000000000"], "for a record of each step"),
    ] {
        let error = refused(program, arguments);
        assert!(error.contains(part), "{program} {arguments:?}: {error}");
    }
    let error = refused("train_gpt", &["--layers", "10000"]);
    assert!(error.ends_with("; this process may have (ulimit -v) 4.00 GiB\n"), "{error}");
    let error = refused("train_gpt", &["--mesh", "60000x60000"]);
    assert!(error.contains("3600000000 ranks: at most 64 run as threads"), "{error}");
}

#[test]
fn a_text_is_a_regular_file_of_bounded_length() {
    let folder = TempDir::new().expect("a folder");
    let [fifo, huge] = ["fifo", "huge"].map(|name| folder.path().join(name));
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("it starts").success());
    File::create(&huge).and_then(|file| file.set_len(1 << 40)).expect("a hole");
    let [fifo, huge] = [fifo, huge].map(|path| path.display().to_string());
    for (data, problem) in [
        ("/dev/zero", "it is a device"),
        (&*fifo, "it is a FIFO"),
        ("/", "it is a directory"),
        (&*huge, "it has more than 268435456 bytes"),
    ] {
        for program in ["train_gpt", "finetune"] {
            let error = refused(program, &["--data", data]);
            assert!(error.contains(problem), "{program} {data}: {error}");
        }
    }
}

/// A FIFO in place of the metrics of an earlier run would hold a resumed run for ever.
#[test]
fn metrics_that_cannot_be_read_are_refused() {
    let folder = TempDir::new().expect("a folder");
    let [text, out] = ["text", "out"].map(|name| folder.path().join(name));
    fs::write(&text, "how much wood would a woodchuck chuck? ".repeat(20)).expect("a file");
    let metrics = out.join("metrics.jsonl");
    let [text, out] = [text, out].map(|path| path.display().to_string());
    let run = ["--data", &text, "--out", &out, "--save-every", "1", "--resume", "--steps"];
    let run = [&SMALL[..], &run].concat();
    let first = bounded(example("train_gpt")).args(&run).arg("1").output().expect("it starts");
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    fs::remove_file(&metrics).expect("there");
    assert!(Command::new("mkfifo").arg(&metrics).status().expect("it starts").success());
    let error = refused("train_gpt", &[&run[..], &["2"]].concat());
    assert!(error.contains("metrics.jsonl: it is a FIFO"), "{error}");
    fs::remove_file(&metrics).expect("there");
    File::create(&metrics).and_then(|file| file.set_len(1 << 40)).expect("a hole");
    let error = refused("train_gpt", &[&run[..], &["2"]].concat());
    assert!(error.contains("metrics.jsonl: line 1 has more than 16777216 bytes"), "{error}");
}

/// The files of a run are opened before its first step, at its first step and at its end. A FIFO
/// would hold it at each.
#[test]
fn outputs_that_cannot_be_written_are_refused_before_the_run() {
    for name in ["summary.json", "loss.svg", "trace.json", "trace.json.new", "metrics.jsonl.new"] {
        let folder = TempDir::new().expect("a folder");
        let [text, out] = ["text", "out"].map(|name| folder.path().join(name));
        fs::write(&text, "how much wood would a woodchuck chuck? ".repeat(20)).expect("a file");
        fs::create_dir(&out).expect("a folder");
        assert!(Command::new("mkfifo").arg(out.join(name)).status().expect("starts").success());
        let [text, out] = [text, out].map(|path| path.display().to_string());
        let run = [&SMALL[..], &["--data", &text, "--out", &out, "--steps", "1"]].concat();
        let error = refused("train_gpt", &run);
        let expected = format!("/{name}: it is a FIFO; a regular file is needed\n");
        assert!(error.ends_with(&expected), "{name}: {error}");
    }
}

#[test]
fn a_full_disk_is_one_line_and_no_success() {
    let folder = TempDir::new().expect("a folder");
    let text = folder.path().join("text");
    fs::write(&text, "how much wood would a woodchuck chuck? ".repeat(20)).expect("a file");
    let text = text.display().to_string();
    let trained = [&SMALL[..], &["--steps", "1", "--data", &text]].concat();
    for (program, arguments) in [
        ("train_gpt", &trained[..]),
        ("contrastive", &["--steps", "2"]),
        ("train_gpt", &["--help"]),
        ("contrastive", &["--version"]),
    ] {
        let output = on_a_full_disk(bounded(example(program)).args(arguments)).expect("it starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{program} {arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{program} {arguments:?}: {error}");
        assert!(error.contains("cannot print to stdout: No space left"), "{program}: {error}");
    }
}
