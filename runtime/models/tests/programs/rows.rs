//! The program of the guide: it is the one on the page, and it trains, is killed, resumes, keeps
//! its best checkpoint and ends early.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::place::{Running, checkpoints, ended_well, numbers, saved, steps};
use crate::{example, stderr};

/// A folder for runs of the program.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(TempDir::new().expect("a folder"))
    }

    fn out(&self) -> PathBuf {
        self.0.path().join("run")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = example("rows");
        command.arg("--out").arg(self.out()).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the program starts")
    }

    fn metrics(&self) -> Vec<Value> {
        steps(&self.out())
    }

    fn summary(&self) -> Value {
        let text = fs::read(self.out().join("summary.json")).expect("a file");
        serde_json::from_slice(&text).expect("JSON")
    }
}

#[test]
fn the_page_has_this_program() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path| fs::read_to_string(root.join(path)).expect("a file");
    let program = read("examples/rows.rs");
    let (_, program) = program.split_once("\n\n").expect("a heading");
    assert!(read("../../docs/guide.md").contains(program), "docs/guide.md lacks examples/rows.rs");
}

#[test]
fn it_is_killed_and_resumes_as_if_it_had_not_been() {
    let recipe = ["--steps", "400", "--save-every", "20", "--evaluate-every", "30"];
    let undisturbed = Place::new();
    ended_well(&undisturbed.run(&recipe));
    let place = Place::new();
    let resumed = [&recipe[..], &["--resume"]].concat();
    for (turn, at) in [25, 130, 250].into_iter().enumerate() {
        let mut run = Running::of(place.command(if turn == 0 { &recipe } else { &resumed }));
        run.until("a step", || place.metrics().len() > at);
        run.send(Signal::SIGKILL);
        run.ended();
    }
    ended_well(&place.run(&resumed));
    let steps = place.metrics();
    assert_eq!(numbers(&steps), (0..400).collect::<Vec<_>>());
    assert_eq!(steps, undisturbed.metrics());
    let evaluated = steps.iter().filter(|step| step["evaluation"].is_number());
    let evaluated: Vec<_> = evaluated.map(|step| step["step"].as_u64().expect("a step")).collect();
    let every: Vec<_> = (29..400).step_by(30).chain([399]).collect();
    assert_eq!(evaluated, every, "after every 30 steps and after the last");
    let best = |place: &Place| place.summary()["best_evaluation"].clone();
    assert_eq!(best(&place), best(&undisturbed));
}

#[test]
fn the_memory_of_a_resumed_run_is_as_planned() {
    let place = Place::new();
    ended_well(&place.run(&["--steps", "20", "--save-every", "20"]));
    ended_well(&place.run(&["--steps", "40", "--resume"]));
    let summary = place.summary();
    for rank in summary["ranks"].as_array().expect("ranks") {
        for category in ["shard", "optimizer"] {
            let peak = &rank["peak_memory_bytes"][category];
            assert!(peak["planned"].as_u64() > Some(0), "{rank}");
            assert_eq!(peak["planned"], peak["measured"], "{category}: {rank}");
        }
    }
}

#[test]
fn the_last_checkpoints_and_the_best_one_are_kept() {
    let place = Place::new();
    let keeping = ["--save-every", "5", "--keep", "3", "--evaluate-every", "5", "--save-best"];
    ended_well(&place.run(&[&["--steps", "40"], &keeping[..]].concat()));
    let last: Vec<String> = [30, 35, 40].map(|step| format!("step-{step:08}")).into();
    assert_eq!(saved(&place.out()), last);
    let metrics = place.metrics();
    let evaluations = metrics
        .iter()
        .filter_map(|step| Some((step["evaluation"].as_f64()?, step["step"].as_u64()? + 1)));
    let (_, best) = evaluations.min_by(|one, other| one.0.total_cmp(&other.0)).expect("some");
    let kept = checkpoints(&place.out().join("best"));
    assert_eq!(kept.last(), Some(&format!("step-{best:08}")), "{kept:?}");
}

#[test]
fn a_run_that_no_longer_improves_ends_and_stays_ended() {
    let place = Place::new();
    let patient = ["--steps", "4000", "--save-every", "100", "--evaluate-every", "5"];
    let patient = [&patient[..], &["--patience", "2"]].concat();
    ended_well(&place.run(&patient));
    let metrics = place.metrics();
    let evaluations: Vec<f64> =
        metrics.iter().filter_map(|step| step["evaluation"].as_f64()).collect();
    let best = evaluations.iter().copied().fold(f64::INFINITY, f64::min);
    let at = evaluations.iter().position(|it| *it == best).expect("the best");
    assert!(metrics.len() < 4000, "it ends early");
    assert_eq!(at + 3, evaluations.len(), "two in a row are not better: {evaluations:?}");
    let files = fs::read(place.out().join("metrics.jsonl")).expect("a file");
    let again = place.run(&[&patient[..], &["--resume"]].concat());
    ended_well(&again);
    let told =
        format!("ended after step {} of 4000: 2 evaluations were not better\n", metrics.len());
    assert_eq!(String::from_utf8_lossy(&again.stdout), told);
    assert_eq!(fs::read(place.out().join("metrics.jsonl")).expect("a file"), files);
}

#[test]
fn the_best_checkpoint_is_found_again() {
    let place = Place::new();
    let best = ["--evaluate-every", "5", "--save-best", "--save-every", "1000000"];
    let mut run = Running::of(place.command(&[&best[..], &["--steps", "1000000"]].concat()));
    run.until("a step", || place.metrics().len() > 60);
    run.send(Signal::SIGKILL);
    run.ended();
    let folder = place.out().join("best");
    assert!(!checkpoints(&folder).is_empty(), "some were saved before the run was killed");
    // There is no other checkpoint to resume from, so the steps are made again.
    let begun = place.run(&[&best[..], &["--steps", "12", "--resume"]].concat());
    ended_well(&begun);
    let told = format!(
        "rows: warning: the best checkpoints in {} are removed: they are of steps after step 0, from \
         which the run goes on\nrows: there is no checkpoint: the run begins at step 0\n",
        folder.display()
    );
    assert_eq!(stderr(&begun), told);
    assert_eq!(checkpoints(&folder), ["step-00000010", "step-00000012"]);
    let before = place.summary()["best_evaluation"].clone();
    let resumed = place.run(&[&best[..], &["--steps", "13", "--resume"]].concat());
    ended_well(&resumed);
    assert!(place.summary()["best_evaluation"].as_f64() <= before.as_f64());
    ended_well(&place.run(&[&best[..], &["--steps", "30", "--resume", "--mesh", "1x2"]].concat()));
    let last = checkpoints(&folder);
    assert!(last.last().is_some_and(|last| **last > *"step-00000012"), "{last:?}");
}

#[test]
fn a_folder_with_checkpoints_is_not_begun_anew() {
    let place = Place::new();
    ended_well(&place.run(&["--steps", "4", "--save-every", "2"]));
    let before = place.metrics();
    for arguments in [&["--steps", "6"][..], &["--steps", "6", "--save-every", "2"]] {
        let refused = place.run(arguments);
        let told = format!(
            "rows: {} has checkpoints of an earlier run, the newest of step 4: go on from it with \
             --resume, or choose another folder with --out\n",
            place.out().display()
        );
        assert_eq!((refused.status.code(), stderr(&refused)), (Some(2), told));
        assert_eq!(place.metrics(), before);
    }
    let resumed = place.run(&["--steps", "6", "--resume"]);
    assert_eq!(stderr(&resumed), "rows: resumes after step 4\n");
    assert_eq!(numbers(&place.metrics()), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn options_that_would_have_no_effect_are_refused() {
    for (arguments, needed) in [
        (&["--patience", "2"][..], "--evaluate-every"),
        (&["--save-best", "--save-every", "2"], "--evaluate-every"),
        (&["--save-best", "--evaluate-every", "2"], "--save-every"),
        (&["--keep", "1"], "--keep"),
    ] {
        let refused = Place::new().run(arguments);
        let told = stderr(&refused);
        assert_eq!((refused.status.code(), told.lines().count()), (Some(2), 1), "{told}");
        assert!(told.contains(needed), "{told}");
    }
    let refused = example("rows").args(["--save-every", "2"]).output().expect("it starts");
    assert!(stderr(&refused).contains("--out"), "{}", stderr(&refused));
}
