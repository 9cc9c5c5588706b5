//! The example as a program that ends early and is resumed.

#![cfg(unix)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use common::example;

/// The longest time that a program may take to make a step.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder with a text and the files of a run.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = TempDir::new().expect("a folder");
        let text = "how much wood would a woodchuck chuck? ".repeat(20);
        fs::write(folder.path().join("text"), text).expect("a file");
        Self { folder }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn start(&self, arguments: &[&str]) -> Child {
        let mut program = example("train_gpt");
        program.arg("--data").arg(self.folder.path().join("text")).arg("--out").arg(self.out());
        program.args([
            "--layers",
            "1",
            "--width",
            "16",
            "--heads",
            "2",
            "--context",
            "8",
            "--batch",
            "2",
        ]);
        program.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        program.spawn().expect("the program starts")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.start(arguments).wait_with_output().expect("it ends")
    }

    /// The steps in a run's metrics, without the time that they took.
    fn steps(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.out().join("metrics.jsonl")).unwrap_or_default();
        let step = |line: &str| {
            let mut line: Value = serde_json::from_str(line).ok()?;
            line.as_object_mut()?.remove("seconds");
            Some(line)
        };
        text.lines().filter_map(step).collect()
    }

    /// Waits until a step is in a run's metrics.
    fn wait_for(&self, step: usize, run: &mut Child) {
        let begun = Instant::now();
        while self.steps().len() <= step {
            assert!(begun.elapsed() < PATIENCE, "step {step} does not come");
            assert!(run.try_wait().expect("a child").is_none(), "it ended before step {step}");
            thread::park_timeout(Duration::from_millis(1));
        }
    }
}

fn ended_well(output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}", output.status);
}

fn numbers(steps: &[Value]) -> Vec<u64> {
    steps.iter().map(|step| step["step"].as_u64().expect("a number")).collect()
}

/// The names of the checkpoints in the folder.
fn saved(out: &Path) -> Vec<String> {
    let entries = fs::read_dir(out.join("checkpoints")).expect("a folder");
    let names = entries.map(|it| it.expect("there").file_name().to_string_lossy().into_owned());
    let mut saved: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
    saved.sort();
    saved
}

#[test]
fn a_run_that_is_killed_again_and_again_has_the_losses_of_one_that_is_not() {
    let recipe = ["--steps", "150", "--save-every", "10"];
    let undisturbed = Place::new();
    ended_well(&undisturbed.run(&recipe));
    let expected = undisturbed.steps();
    assert_eq!(expected.len(), 150);

    let place = Place::new();
    let resumed = [&recipe[..], &["--resume"]].concat();
    for (turn, at) in [3, 27, 60, 61, 111].into_iter().enumerate() {
        // The first one has nothing to resume from.
        let mut run = place.start(if turn == 0 { &recipe } else { &resumed });
        place.wait_for(at, &mut run);
        run.kill().expect("it runs");
        run.wait().expect("it ends");
    }
    ended_well(&place.run(&resumed));
    assert_eq!(place.steps(), expected);
    assert_eq!(saved(&place.out()), ["step-00000140", "step-00000150"]);
}

#[test]
fn row_43_sigterm_ends_the_step_on_all_ranks_and_saves() {
    let place = Place::new();
    let recipe = ["--steps", "1000000", "--save-every", "1000000"];
    let mut run = place.start(&recipe);
    place.wait_for(5, &mut run);
    let pid = Pid::from_raw(i32::try_from(run.id()).expect("a pid"));
    kill(pid, Signal::SIGTERM).expect("it runs");
    let ended = run.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(143), "{said}");
    let steps = place.steps().len();
    assert!(
        said.ends_with(&format!("train_gpt: stopped by signal 15 after step {steps}\n")),
        "{said}"
    );
    assert_eq!(saved(&place.out()), [format!("step-{steps:08}")]);

    let more = (steps + 3).to_string();
    ended_well(&place.run(&["--steps", &more, "--resume"]));
    assert_eq!(numbers(&place.steps()), (0..steps as u64 + 3).collect::<Vec<_>>());
}

#[test]
fn another_mesh_goes_on() {
    let place = Place::new();
    ended_well(&place.run(&["--steps", "6", "--save-every", "2", "--mesh", "2x2"]));
    for (steps, mesh) in [("8", "1x3"), ("10", "3x1"), ("12", "1x1")] {
        let arguments = ["--steps", steps, "--save-every", "2", "--mesh", mesh, "--resume"];
        ended_well(&place.run(&arguments));
    }
    assert_eq!(numbers(&place.steps()), (0..12).collect::<Vec<_>>());
}

#[test]
fn without_a_checkpoint_a_run_begins_and_with_another_seed_it_does_not() {
    let place = Place::new();
    ended_well(&place.run(&["--steps", "2", "--save-every", "2", "--resume"]));
    assert_eq!(numbers(&place.steps()), [0, 1]);
    for (arguments, expected) in [
        (
            &["--steps", "4", "--resume", "--seed", "2"][..],
            "train_gpt: --resume: the checkpoint of step 2 was made with seed 1, this run has 2\n",
        ),
        (&["--steps", "2", "--resume"], "train_gpt: --resume: all 2 steps are made\n"),
    ] {
        let refused = place.run(arguments);
        assert_eq!(String::from_utf8_lossy(&refused.stderr), expected);
        assert_eq!(refused.status.code(), Some(2));
        assert_eq!(numbers(&place.steps()), [0, 1], "the run's files are as they were");
    }
    let refused = example("train_gpt").arg("--resume").output().expect("the program starts");
    let told = "train_gpt: the following required arguments were not provided: --out <DIR>\n";
    assert_eq!(String::from_utf8_lossy(&refused.stderr), told);
}
