//! Training on four processes has the losses of training on four threads, bit for bit.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::Named;
use crate::job::{ON_TEXT, has, mpirun, run, train_gpt};

pub(crate) const TRIALS: &[Named] = &[
    ("training::f32_on_the_wire", f32_on_the_wire),
    ("training::bf16_on_the_wire", || equals(&["--reduce-dtype", "bf16"])),
    ("training::f16_on_the_wire", || equals(&["--reduce-dtype", "f16"])),
    ("training::bf16_parameters", || equals(&["--param-dtype", "bf16"])),
    ("training::every_microbatch", || equals(&["--accumulation", "every"])),
    ("training::local_accumulation", || equals(&["--accumulation", "local"])),
    ("training::state_over_the_world", || {
        equals(&["--state-over", "world", "--param-dtype", "bf16"])
    }),
    ("training::an_unsharded_twin_agrees", verifies),
    ("training::another_number_of_processes_is_refused_once", refused),
];

const STEPS: [&str; 6] = ["--mesh", "2x2", "--steps", "6", "--layers", "2"];

/// Runs six steps; the bits of their losses and norms.
pub(crate) fn ended_well(mut command: Command, out: &Path) -> Result<Vec<[u64; 2]>, String> {
    let ended = run({
        command.args(ON_TEXT).args(STEPS).arg("--out").arg(out);
        command
    })?;
    if ended.code != Some(0) {
        return Err(format!("exit code {:?}: {}", ended.code, ended.err));
    }
    losses(out)
}

/// The bits of the losses and gradient norms of a run.
pub(crate) fn losses(out: &Path) -> Result<Vec<[u64; 2]>, String> {
    let lines = fs::read_to_string(out.join("metrics.jsonl")).map_err(|error| error.to_string())?;
    lines.lines().map(bits).collect()
}

/// The same of six steps on four threads.
pub(crate) fn of_threads(out: &Path) -> Result<Vec<[u64; 2]>, String> {
    let mut threads = Command::new(train_gpt());
    threads.env("RAYON_NUM_THREADS", "1");
    ended_well(threads, out)
}

/// The bits of a step's loss and gradient norm.
fn bits(line: &str) -> Result<[u64; 2], String> {
    let step: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let bits = |field: &str| step[field].as_f64().map_or(0, f64::to_bits);
    Ok([bits("loss"), bits("grad_norm")])
}

fn f32_on_the_wire() -> Result<(), String> {
    equals(&["--reduce-dtype", "f32"])
}

fn equals(arguments: &[&str]) -> Result<(), String> {
    let folder = TempDir::new().map_err(|error| error.to_string())?;
    let mut threads = Command::new(train_gpt());
    threads.args(arguments).env("RAYON_NUM_THREADS", "1");
    let by_threads = ended_well(threads, &folder.path().join("threads"))?;
    let mut processes = mpirun();
    processes.args(["-n", "4"]).arg(train_gpt()).args(["--comm", "mpi"]).args(arguments);
    let by_processes = ended_well(processes, &folder.path().join("processes"))?;
    if by_threads.len() == 6 && by_threads == by_processes {
        return Ok(());
    }
    Err(format!("threads {by_threads:?}\nprocesses {by_processes:?}"))
}

fn verifies() -> Result<(), String> {
    let mut command = mpirun();
    command
        .args(["-n", "4"])
        .args([env!("CARGO_BIN_EXE_verify"), "gpt"])
        .args(ON_TEXT)
        .args(STEPS)
        .args(["--comm", "mpi"]);
    let ended = run(command)?;
    has(&ended.out, &["verified"])?;
    if ended.code == Some(0) { Ok(()) } else { Err(ended.err) }
}

fn refused() -> Result<(), String> {
    let mut command = mpirun();
    command.args(["-n", "3"]).arg(train_gpt()).args(["--mesh", "2x2", "--comm", "mpi"]);
    let ended = run(command)?;
    // mpirun writes between what its processes write.
    let told = "mesh 2x2 has 4 ranks, and there are 3 processes";
    match (ended.err.matches(told).count(), ended.code) {
        (1, Some(2)) => Ok(()),
        _ => Err(format!("exit code {:?}: {}", ended.code, ended.err)),
    }
}
