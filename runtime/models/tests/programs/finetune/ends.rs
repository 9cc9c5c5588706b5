//! Runs that end early, and exports that fail.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::place::{Place, TUNE};
use crate::place::Running;

/// Options of a run that is far from its end when a test has seen its first step.
const LONG: &str = "--data {text} --context 8 --batch 1 --mesh 1x1 --microbatches 1 --lora 2";

/// Starts a run that exports adapters to `tuned`, and waits until its first step is made.
fn start(place: &Place, steps: usize) -> Running {
    fs::write(place.path("text"), "she sells sea shells ".repeat(40)).expect("written");
    let arguments = format!("{LONG} --steps {steps} --out {{out}} --export {{tuned}}");
    let mut run = Running::of(place.command(&arguments));
    let metrics = place.path("out/metrics.jsonl");
    run.until("step 0", || fs::read_to_string(&metrics).is_ok_and(|text| text.contains('\n')));
    run
}

#[test]
fn a_run_that_a_signal_ends_exports_nothing() {
    let place = Place::new();
    let mut run = start(&place, 1_000_000);
    run.send(Signal::SIGTERM);
    let ended = run.ended();
    assert_eq!(ended.status.code(), Some(143));
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(said.ends_with("\nnothing is exported: a signal has ended the run\n"), "{said}");
    assert_eq!(fs::read_dir(place.path("tuned")).expect("a folder").count(), 0);
}

#[test]
fn an_export_that_fails_leaves_the_report() {
    let place = Place::new();
    let run = start(&place, 300);
    fs::remove_dir(place.path("tuned")).expect("an empty folder");
    fs::write(place.path("tuned"), "").expect("a file");
    let ended = run.ended();
    let [said, printed] = [&ended.stderr, &ended.stdout].map(|it| String::from_utf8_lossy(it));
    assert_eq!(ended.status.code(), Some(1), "{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("finetune: training failed: cannot write "), "{said}");
    assert!(
        printed.contains("300 steps on mesh 1x1") && !printed.contains("exported"),
        "{printed}"
    );
    assert_eq!(place.json("out/summary.json")["steps"], 300);
}

#[test]
fn evaluations_keep_the_best_weights_and_end_a_run() {
    let place = Place::new();
    let run = format!("{TUNE} --evaluate-every 2 --patience 1 --save-best --save-every 2");
    let said = place.trained(&format!("{run} --steps 5 --out {{out}}"));
    assert!(said.contains("best evaluation"), "{said}");
    let text = fs::read_to_string(place.path("out/metrics.jsonl")).expect("metrics");
    let line = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
    let evaluations: Vec<Value> = text.lines().map(|it| line(it)["evaluation"].clone()).collect();
    let evaluated = evaluations.iter().map(Value::is_number);
    assert_eq!(Vec::from_iter(evaluated), [false, true, false, true, true], "{text}");
    let summary = place.json("out/summary.json");
    assert_eq!(summary["eval_loss_after"], evaluations[4]);
    assert_eq!(summary["best_evaluation"], evaluations[4]);
    assert!(place.path("out/best/step-00000005").exists());
    // At this rate no weight changes.
    place.trained(&format!("{run} --lr 1e-37 --out {{still}}"));
    assert_eq!(place.losses("still").len(), 4);
}
