//! `train_gpt` as a program: its folder is full, broken, or in use.

use std::fs;
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::place::{Place, ended_well, saved};
use crate::{example, stderr};

/// The largest file that a program may write, in blocks of 512 bytes: larger than all files of
/// these runs but the checkpoints' and the trace.
const MOST_BLOCKS: u32 = 24;

/// `train_gpt` on a disk that is full after [`MOST_BLOCKS`]: an error of the system's, and no signal. The shell sends the
/// output where `redirection` says.
fn on_a_full_disk(redirection: &str) -> Command {
    let mut shell = Command::new("sh");
    let limit = format!("trap '' XFSZ; ulimit -f {MOST_BLOCKS}; exec \"$@\" {redirection}");
    shell.args(["-c", &limit, "sh"]).arg(example("train_gpt").get_program());
    shell
}

/// Warnings of checkpoints that have failed, in the file of the run.
fn failed_saves(place: &Place) -> Vec<String> {
    let text = fs::read_to_string(place.out().join("warnings.jsonl")).unwrap_or_default();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let errors = lines.filter_map(|line| line["fields"]["error"].as_str().map(str::to_owned));
    errors.filter(|error| error.starts_with("saving at step")).collect()
}

#[test]
fn saves_that_fail_are_told_kept_and_counted_and_the_run_fails() {
    let place = Place::new();
    let recipe = ["--steps", "8", "--save-every", "2", "--mesh", "1x2"];
    let run = place.start_as(on_a_full_disk(""), &recipe);
    let run = run.ended();
    let said = stderr(&run);
    assert_eq!(run.status.code(), Some(1), "{said}");
    for step in [2, 4, 6] {
        let warning = "train_gpt: warning: a checkpoint failed: training goes on without it";
        let told = format!("{warning} (error: saving at step {step}, on rank ");
        assert_eq!(said.matches(&told).count(), 1, "{said}");
        let kept = failed_saves(&place);
        let told = format!("saving at step {step}, on rank ");
        assert!(kept.iter().any(|error| error.starts_with(&told)), "{kept:?}");
    }
    let last = said.lines().last().unwrap_or_default();
    let told =
        "train_gpt: training failed: the last checkpoint was not saved: saving at step 8, on rank ";
    assert!(last.starts_with(told) && last.contains("File too large"), "{said}");
    // The results are there nevertheless.
    assert_eq!(place.steps().len(), 8);
    let table = String::from_utf8_lossy(&run.stdout);
    assert!(table.contains("│ warnings") && table.contains("sample:"), "{table}");
    let summary = place.files()["summary.json"].clone();
    let summary: Value = serde_json::from_slice(&summary).expect("JSON");
    assert!(summary["warnings"].as_u64() >= Some(3), "{summary}");
}

/// No reader of the report would miss the checkpoint otherwise.
#[test]
fn a_lost_checkpoint_is_told_though_the_report_is_lost() {
    let place = Place::new();
    let recipe = ["--steps", "1", "--save-every", "1", "--mesh", "1x2"];
    let run = place.start_as(on_a_full_disk("> /dev/full"), &recipe).ended();
    let said = stderr(&run);
    assert_eq!(run.status.code(), Some(1), "{said}");
    let [.., checkpoint, report] = *said.lines().collect::<Vec<_>>() else { panic!("{said}") };
    let told = "train_gpt: training failed: the last checkpoint was not saved: saving at step 1";
    assert!(checkpoint.starts_with(told), "{said}");
    assert!(report.starts_with("train_gpt: cannot print to stdout: No space left"), "{said}");
}

#[test]
fn only_the_last_save_decides_how_a_run_ends() {
    let place = Place::new();
    let mut run = place.start(&["--steps", "1000000", "--save-every", "5"]);
    place.wait_for(6, &mut run);
    // Saves fail for a time.
    let [checkpoints, aside] = ["checkpoints", "aside"].map(|name| place.out().join(name));
    fs::rename(&checkpoints, &aside).expect("a folder");
    fs::write(&checkpoints, "").expect("a file");
    run.until("a warning", || !failed_saves(&place).is_empty());
    fs::remove_file(&checkpoints).expect("a file");
    fs::rename(&aside, &checkpoints).expect("a folder");
    run.send(Signal::SIGTERM);
    let ended = run.ended();
    let said = stderr(&ended);
    let steps = place.steps().len();
    assert_eq!(ended.status.code(), Some(143), "{said}");
    assert!(said.contains("warning: a checkpoint failed"), "{said}");
    assert!(saved(&place.out()).contains(&format!("step-{steps:08}")), "{said}");
    // The warnings of the run that goes on follow those of the one before.
    let before = failed_saves(&place);
    let more = (steps + 1).to_string();
    ended_well(&place.run(&["--steps", &more, "--resume"]));
    assert_eq!(failed_saves(&place), before);
}

#[test]
fn a_stop_whose_checkpoint_fails_is_a_failure() {
    let place = Place::new();
    let mut run = place.start(&["--steps", "1000000", "--save-every", "1000000"]);
    place.wait_for(2, &mut run);
    let checkpoints = place.out().join("checkpoints");
    fs::remove_dir_all(&checkpoints).expect("a folder");
    fs::write(&checkpoints, "").expect("a file");
    run.send(Signal::SIGTERM);
    let ended = run.ended();
    let said = stderr(&ended);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("stopped by signal 15 after step"), "{said}");
    assert!(said.contains("and the last checkpoint was not saved: saving at step"), "{said}");
}

#[test]
fn a_folder_in_the_place_of_a_file_is_refused_before_the_run() {
    let files =
        ["loss.svg", "metrics.jsonl", "norms.svg", "run.lock", "summary.json", "trace.json"];
    for name in files.into_iter().chain(["warnings.jsonl"]) {
        let place = Place::new();
        let path = place.out().join(name);
        fs::create_dir_all(&path).expect("a folder");
        let refused = place.run(&["--steps", "2"]);
        let said = stderr(&refused);
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains(&path.display().to_string()), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_second_run_in_one_folder_is_refused_and_changes_nothing() {
    let place = Place::new();
    ended_well(&place.run(&["--steps", "3"]));
    let mut first = place.start(&["--steps", "1000000"]);
    // It has begun the files anew, which had three steps.
    place.wait_for(3, &mut first);
    first.stop();
    let files = place.files();
    let refused = place.run(&["--steps", "2"]);
    let process = first.process();
    let told =
        format!("train_gpt: another run (process {process}) writes to {}\n", place.out().display());
    assert_eq!(stderr(&refused), told);
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(place.files(), files, "the files of the first run are as they were");
    // A run that is killed keeps no other one from the folder.
    first.send(Signal::SIGKILL);
    first.ended();
    ended_well(&place.run(&["--steps", "2", "--resume"]));
}

#[test]
fn warnings_of_an_earlier_run_stay_until_another_begins() {
    let place = Place::new();
    let recipe = ["--steps", "2", "--save-every", "2"];
    ended_well(&place.run(&recipe));
    let names = ["warnings.jsonl", "warnings-rank-1.jsonl", "warnings-rank-7.jsonl"];
    let other = "warnings-rank-seven.jsonl";
    for name in names.into_iter().chain([other]) {
        fs::write(place.out().join(name), "{}\n").expect("written");
    }
    let there = || names.map(|name| place.files().contains_key(name));
    // Both are found when the folder is locked: a unit that the model does not have, and a
    // checkpoint of another seed.
    let fault = "rank 0, step 1, unit 99: panic";
    for refused in [["--fault", fault].as_slice(), &["--resume", "--seed", "2"]] {
        let refused = place.run(&[&recipe[..], refused].concat());
        assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
        assert_eq!(there(), [true; 3]);
    }
    ended_well(&place.run(&["--steps", "3", "--save-every", "1", "--resume"]));
    assert_eq!(there(), [true; 3], "a run that goes on keeps them");
    fs::remove_dir_all(place.out().join("checkpoints")).expect("a folder");
    ended_well(&place.run(&["--steps", "2"]));
    assert_eq!(there(), [false; 3]);
    assert!(place.files().contains_key(other), "it is no file of a run");
}
