//! `train_gpt` as a program: its exit codes and its files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use hsdp_train::testing::refusal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{example, stdout};

fn run(arguments: &[&str]) -> Output {
    example("train_gpt").args(arguments).output().expect("the program starts")
}

/// A folder with a text, and a model that learns it fast.
struct Workplace {
    folder: TempDir,
}

impl Workplace {
    fn new() -> Self {
        let folder = TempDir::new().expect("a folder");
        fs::write(folder.path().join("text"), "how much wood would a woodchuck chuck? ".repeat(20))
            .expect("a file");
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn train(&self, arguments: &[&str]) -> Output {
        let text = self.path("text").display().to_string();
        let small =
            ["--data", &text, "--layers", "2", "--width", "16", "--heads", "2", "--context", "16"];
        run(&[&small, arguments].concat())
    }
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let place = Workplace::new();
    let [binary, short] = ["binary", "short"].map(|name| place.path(name));
    fs::write(&binary, [0xff, 0xfe, 0x00]).expect("a file");
    fs::write(&short, "too short").expect("a file");
    let [binary, short] = [binary, short].map(|path| path.display().to_string());
    let cases: [(&[&str], &str); 16] = [
        (&["--mesh", "2by2"], "2x3"),
        (&["--device", "gpu"], "cpu, cuda or cuda:1"),
        (&["--mesh", "0x2"], "0x2"),
        (&["--mesh", "9x9"], "81 ranks"),
        (&["--width", "10", "--heads", "4"], "width 10 is not divisible by 4 heads"),
        (&["--data", "/no/such/file"], "/no/such/file"),
        (&["--data", &binary], "not UTF-8"),
        (&["--data", &short], "a context of 64 needs at least 65"),
        (&["--param-dtype", "f8"], "f32, bf16 or f16"),
        (&["--reduce-dtype", "i32"], "f32, bf16 or f16"),
        (&["--microbatches", "0"], "--microbatches"),
        (&["--steps", "-1"], "-1"),
        (&["--lr", "nan"], "above 0"),
        (&["--lr", "1e300"], "from 1e-37 to 1e6"),
        (&["--accumulation", "never"], "reduce-scatter, every or local"),
        (&["--colour", "blue"], "--colour"),
    ];
    for (arguments, phrase) in cases {
        let message = refusal(example("train_gpt").args(arguments));
        assert!(message.contains(phrase), "{arguments:?}: {message}");
    }
}

#[test]
fn bad_input_of_a_process_among_others_names_its_rank() {
    let mut program = example("train_gpt");
    program.args(["--steps", "0"]);
    program.env("OMPI_COMM_WORLD_RANK", "3").env("OMPI_COMM_WORLD_SIZE", "4");
    let message = refusal(&mut program);
    assert!(message.starts_with("train_gpt: rank 3: invalid value '0' for '--steps"), "{message}");
}

#[test]
fn the_name_of_a_folder_does_not_change_the_terminal() {
    let place = Workplace::new();
    let out = place.path("a\nb\u{1b}[2J");
    fs::create_dir_all(out.join("run.lock")).expect("a folder");
    let output = place.train(&["--out", &out.display().to_string()]);
    let message = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("/a\\nb\\u{1b}[2J/run.lock: "), "{message}");
    assert_eq!(message.chars().filter(|c| c.is_control()).count(), 1, "{message:?}");
}

#[test]
fn the_lines_below_a_failure_explain_it() {
    let arguments = ["--mesh", "1x2", "--steps", "3", "--fault", "rank 1, step 1, unit 1: panic"];
    let output = Workplace::new().train(&arguments);
    let message = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{message}");
    let (_, told) = message.split_once("train_gpt: training failed: rank 1: ").expect(&message);
    let last = "rank 1 has not issued it: its last operation was all_gather of unit 0";
    assert!(told.contains(last) && !told.contains("no record"), "{message}");
}

#[test]
fn help_is_no_failure() {
    assert!(stdout(&run(&["--help"])).contains("--mesh <RxS>"));
}

#[test]
fn a_run_leaves_its_files_and_the_same_numbers_each_time() {
    let place = Workplace::new();
    let records = ["one", "two"].map(|name| {
        let out = place.path(name);
        stdout(&place.train(&["--steps", "12", "--out", &out.display().to_string()]));
        numbers(&out)
    });
    assert_eq!(records[0], records[1]);
    let losses: Vec<f64> =
        records[0].iter().map(|record| record[0].parse().expect("a number")).collect();
    assert!(losses[11] < losses[0] - 0.3, "it learns: {losses:?}");
    check_summary(&place.path("one"));
    check_pictures(&place.path("one"));
}

/// The norms of gradients add up to the gradient norm of their line.
#[test]
fn norms_of_each_parameter_are_recorded_and_drawn_where_they_are_asked_for() {
    let place = Workplace::new();
    let out = place.path("out");
    let shown = out.display().to_string();
    stdout(&place.train(&["--steps", "12", "--norms-every", "5", "--out", &shown]));
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let with_norms = lines.iter().enumerate().filter(|(_, line)| line.get("norms").is_some());
    assert!(with_norms.map(|(step, _)| step).eq([0, 5, 10]), "{text}");
    for line in lines.iter().step_by(5) {
        let [gradients, parameters, updates] = ["gradients", "parameters", "updates"]
            .map(|kind| line["norms"][kind].as_object().expect("numbers by name"));
        assert!(gradients.len() > 20 && parameters.keys().eq(updates.keys()), "{line}");
        let squares = gradients.values().map(|norm| norm.as_f64().expect("a number").powi(2));
        let norm = squares.sum::<f64>().sqrt();
        let told = line["grad_norm"].as_f64();
        assert!(told.is_some_and(|told| (norm - told).abs() <= 1e-12 * told), "{norm}, {told:?}");
    }
    // AdamW moves each of these ones by the rate, 3e-3, up or down, and decays it by a tenth of
    // that.
    let ratio = lines[0]["norms"]["updates"]["ln_f.weight"].as_f64().expect("a number");
    assert!((2.7e-3..3.3e-3).contains(&ratio), "{ratio}");
    let picture = fs::read_to_string(out.join("norms.svg")).expect("a picture");
    for text in ["ln_f.weight", "step 0", "step 10"] {
        assert!(picture.contains(text), "{text}");
    }
    // The background, a hundred of the scale, and a cell for each parameter and step, but for
    // biases that were zero.
    assert!(picture.matches("<rect").count() > 150, "{picture}");
}

/// Loss and gradient norm of each step, as text from the file.
fn numbers(out: &Path) -> Vec<[String; 2]> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let record = |line: &str| -> [String; 2] {
        let record: Value = serde_json::from_str(line).expect("JSON");
        assert!(
            record["step"].is_u64() && record["tokens"].is_u64() && record["seconds"].is_f64(),
            "{line}"
        );
        ["loss", "grad_norm"].map(|field| record[field].to_string())
    };
    let records: Vec<_> = text.lines().map(record).collect();
    assert_eq!(records.len(), 12);
    records
}

fn check_summary(out: &Path) {
    let text = fs::read_to_string(out.join("summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    let ranks = summary["ranks"].as_array().expect("ranks");
    assert_eq!(ranks.len(), 4);
    for rank in ranks {
        for (op, flow) in rank["collectives"].as_object().expect("collectives") {
            assert_eq!(flow["planned"], flow["measured"], "{op}");
            assert!(flow["measured"]["bytes"].as_u64() > Some(0), "{op}");
        }
        for (category, memory) in rank["peak_memory_bytes"].as_object().expect("categories") {
            let [planned, measured] =
                ["planned", "measured"].map(|side| memory[side].as_f64().expect("bytes"));
            assert!((planned - measured).abs() <= 0.02 * planned, "{category}: {memory}");
        }
    }
}

fn check_pictures(out: &Path) {
    let picture = fs::read_to_string(out.join("loss.svg")).expect("a picture");
    assert!(
        picture.contains("<text") && picture.contains("step") && picture.contains("<polyline"),
        "{picture}"
    );
    let trace: Value =
        serde_json::from_str(&fs::read_to_string(out.join("trace.json")).expect("a trace"))
            .expect("JSON");
    let events = trace.as_array().expect("events");
    for rank in 0..4 {
        let lane = format!("rank-{rank}");
        let names = |event: &&Value| event["ph"] == "M" && event["args"]["name"] == lane.as_str();
        assert!(events.iter().any(|event| names(&event)), "no lane for {lane}");
    }
    for span in ["step", "forward", "backward", "finish", "optimizer"] {
        assert!(events.iter().any(|event| event["name"] == span), "no span {span}");
    }
}
