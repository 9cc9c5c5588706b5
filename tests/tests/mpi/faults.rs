//! What goes wrong between processes, by the rows of the fault table: all processes end in time,
//! not well, and say whose doing it is.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use hsdp::{FlightRecord, explain};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tempfile::TempDir;

use crate::Named;
use crate::job::{Ended, Family, Job, ON_TEXT, family, has, hsdp_launch, mpirun, run, train_gpt};

pub(crate) const TRIALS: &[Named] = &[
    ("faults::row_1_a_process_is_killed", killed),
    ("faults::row_1_a_process_is_killed_under_hsdp_launch", killed_under_launch),
    ("faults::row_2_a_process_leaves", || named("leave", "it left, but others wait for it")),
    ("faults::row_3_a_rank_panics", || named("panic", "it panicked")),
    ("faults::row_4_a_process_is_stopped", stopped),
    ("faults::row_5_a_slow_rank_is_waited_for", slow),
    ("faults::row_6_a_process_never_comes", never_comes),
    ("faults::row_13_ranks_disagree", || named("wrong count", "ranks disagree about")),
    ("faults::row_43_the_end_is_asked_for", asked_for),
    ("faults::row_45_a_rank_has_no_memory", has_no_memory),
    ("faults::row_54_another_program", another_program),
    ("faults::row_55_another_seed", another_seed),
];

/// All processes have ended so long after what happened, at the latest.
const PROMPTLY: Duration = Duration::from_secs(2);

pub(crate) fn four(arguments: &[&str], out: &Path) -> Command {
    let mut command = mpirun();
    command.args(["-n", "4"]);
    train(command, arguments, out)
}

fn train(mut command: Command, arguments: &[&str], out: &Path) -> Command {
    command.arg(train_gpt()).args(["--comm", "mpi", "--mesh", "2x2", "--layers", "2"]);
    command.args(ON_TEXT).args(arguments).arg("--out").arg(out);
    command
}

pub(crate) fn folder() -> Result<TempDir, String> {
    TempDir::new().map_err(|error| error.to_string())
}

/// How many steps are in the file that rank 0 writes.
pub(crate) fn steps(out: &Path) -> usize {
    fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

/// Returns the number of the records that were left, and their explanation.
fn explained(out: &Path) -> Result<(usize, String), String> {
    let files = fs::read_dir(out.join("flight")).map_err(|error| format!("flight: {error}"))?;
    let record = |file: fs::DirEntry| {
        let text = fs::read_to_string(file.path()).map_err(|error| error.to_string())?;
        FlightRecord::from_json(&text).map_err(|error| error.to_string())
    };
    let records = files.flatten().map(record).collect::<Result<Vec<_>, _>>()?;
    Ok((records.len(), explain(&records).to_string()))
}

fn badly(ended: &Ended) -> Result<(), String> {
    match ended.code {
        Some(0) => Err(format!("exit code 0: {}", ended.err)),
        _ => Ok(()),
    }
}

fn killed() -> Result<(), String> {
    let out = folder()?;
    kill_rank_2(four(&["--steps", "100000"], out.path()), out.path())
}

fn killed_under_launch() -> Result<(), String> {
    let out = folder()?;
    kill_rank_2(train(hsdp_launch("4"), &["--steps", "100000"], out.path()), out.path())
}

/// Rank 2 is killed in the midst of a run.
pub(crate) fn kill_rank_2(command: Command, out: &Path) -> Result<(), String> {
    let is_launched = command.get_program() != "mpirun";
    let job = Job::start(command)?;
    job.until("three steps", || (steps(out) >= 3).then_some(()))?;
    let processes = job.processes(4)?;
    let at = Instant::now();
    kill(processes[2], Signal::SIGKILL).map_err(|error| error.to_string())?;
    ends_promptly(job, at)?;
    // The launcher lets all of them write.
    if is_launched { rank_2_is_gone(out, 3..=3) } else { is_told(out) }
}

/// All processes end soon after `at`, and not well.
pub(crate) fn ends_promptly(job: Job, at: Instant) -> Result<Ended, String> {
    job.until("the end of all", || job.has_ended().then_some(()))?;
    let took = at.elapsed();
    let ended = job.end()?;
    badly(&ended)?;
    if took > PROMPTLY { Err(format!("all have ended after {took:?}")) } else { Ok(ended) }
}

/// The others know that rank 2 is gone. The mpirun of MPICH kills them at once: they say nothing.
pub(crate) fn is_told(out: &Path) -> Result<(), String> {
    // Another mpirun may be faster than one of the others.
    if family() == Some(Family::Mpich) { Ok(()) } else { rank_2_is_gone(out, 1..=3) }
}

/// The records that were left, as many as are expected, know it.
fn rank_2_is_gone(out: &Path, expected: RangeInclusive<usize>) -> Result<(), String> {
    let (records, text) = explained(out)?;
    has(&text, &["rank 2", "its process is gone"])?;
    if expected.contains(&records) { Ok(()) } else { Err(format!("{records} records: {text}")) }
}

fn named(fault: &str, reason: &str) -> Result<(), String> {
    named_by(fault, reason, |command| command)
}

/// A fault of rank 1 ends the job, and is named.
pub(crate) fn named_by(
    fault: &str,
    reason: &str,
    adapted: impl FnOnce(Command) -> Command,
) -> Result<(), String> {
    let out = folder()?;
    let fault = format!("rank 1, step 2, unit 1, reduce: {fault}");
    let started = Instant::now();
    let ended = run(adapted(four(&["--steps", "100000", "--fault", &fault], out.path())))?;
    badly(&ended)?;
    let (_, text) = explained(out.path())?;
    has(&text, &["rank 1", reason])?;
    let took = ended.at - started;
    if took < Duration::from_secs(60) { Ok(()) } else { Err(format!("it took {took:?}")) }
}

fn stopped() -> Result<(), String> {
    let out = folder()?;
    let job = Job::start(four(&["--steps", "100000", "--deadline", "2"], out.path()))?;
    let processes = job.processes(4)?;
    job.until("three steps", || (steps(out.path()) >= 3).then_some(()))?;
    kill(processes[3], Signal::SIGSTOP).map_err(|error| error.to_string())?;
    // Its peers end by their deadline; then mpirun ends it.
    let ended = job.end()?;
    badly(&ended)?;
    let (_, text) = explained(out.path())?;
    has(&text, &["rank 3", "deadline of 2s missed"])
}

fn slow() -> Result<(), String> {
    let out = folder()?;
    let fault = "rank 1, step 1, unit 1, reduce: delay of 1s";
    let ended = run(four(&["--steps", "3", "--fault", fault], out.path()))?;
    match (ended.code, steps(out.path())) {
        (Some(0), 3) => Ok(()),
        other => Err(format!("{other:?}: {}", ended.err)),
    }
}

fn never_comes() -> Result<(), String> {
    let mut command = mpirun();
    let train = |command: &mut Command| {
        command.arg(train_gpt()).args(["--comm", "mpi", "--mesh", "1x3", "--deadline", "2"]);
    };
    command.args(["-n", "2"]);
    train(&mut command);
    command.args([":", "-n", "1", "sleep", "60"]);
    let started = Instant::now();
    let ended = run(command)?;
    badly(&ended)?;
    has(&ended.err, &["not all processes of the job arrived within 2s"])?;
    let took = ended.at - started;
    if took < Duration::from_secs(20) { Ok(()) } else { Err(format!("it took {took:?}")) }
}

fn asked_for() -> Result<(), String> {
    let out = folder()?;
    let job = Job::start(four(&["--steps", "100000", "--save-every", "100000"], out.path()))?;
    let processes = job.processes(4)?;
    job.until("three steps", || (steps(out.path()) >= 3).then_some(()))?;
    // One rank is told; all make the same step their last, and save.
    kill(processes[1], Signal::SIGTERM).map_err(|error| error.to_string())?;
    let ended = job.end()?;
    // Rank 0 says it, after it has written its files. The others end quietly, so that mpirun does
    // not kill it before.
    has(&ended.err, &["train_gpt: stopped by a signal to another rank after step "])?;
    if ended.code != Some(128 + Signal::SIGTERM as i32) || ended.err.contains("by signal 15") {
        return Err(format!("exit code {:?}: {}", ended.code, ended.err));
    }
    let summary = out.path().join("summary.json");
    let summary = fs::read(&summary).map_err(|error| format!("summary.json: {error}"))?;
    let summary: Value = serde_json::from_slice(&summary).map_err(|error| error.to_string())?;
    let ranks = summary["ranks"].as_array().into_iter().flatten();
    let ranks: Vec<Option<u64>> = ranks.map(|rank| rank["rank"].as_u64()).collect();
    if ranks != [0, 1, 2, 3].map(Some) {
        return Err(format!("summary.json has the costs of ranks {ranks:?}"));
    }
    let saved = fs::read_dir(out.path().join("checkpoints")).map_err(|error| error.to_string())?;
    let saved = saved.flatten().any(|it| it.file_name().to_string_lossy().starts_with("step-"));
    if saved { Ok(()) } else { Err("no checkpoint was saved".to_owned()) }
}

/// All leave an aborted step with one error. A gather that some had begun may be on its way to a
/// rank that has left already, as chance has it, and its sender ends when it is received.
fn has_no_memory() -> Result<(), String> {
    for _ in 0..4 {
        let out = folder()?;
        let fault = "rank 2, step 2, unit 1, gather: out of memory";
        let ended = run(four(&["--steps", "100000", "--fault", fault], out.path()))?;
        badly(&ended)?;
        let aborted = "step 2 aborted by rank 2: all_gather on rank 2, step 2: out of memory: ";
        has(&ended.err, &[aborted, " bytes for its elements, in unit 1, gather, step 2"])?;
    }
    Ok(())
}

fn two_kinds(first: &Path, second: &Path, options: &[&str]) -> Command {
    let mut command = mpirun();
    let two_steps = ["--comm", "mpi", "--mesh", "1x2", "--steps", "2"];
    command.args(["-n", "1"]).arg(first).args(two_steps).args(ON_TEXT);
    command.args([":", "-n", "1"]).arg(second).args(two_steps).args(ON_TEXT).args(options);
    command
}

fn another_program() -> Result<(), String> {
    let out = folder()?;
    let other = out.path().join("train_gpt");
    let mut bytes = fs::read(train_gpt()).map_err(|error| error.to_string())?;
    bytes.extend([0; 16]);
    fs::copy(train_gpt(), &other).map_err(|error| error.to_string())?;
    fs::write(&other, bytes).map_err(|error| error.to_string())?;
    let ended = run(two_kinds(&train_gpt(), &other, &[]))?;
    badly(&ended)?;
    has(&ended.err, &["ranks 0 and 1 differ in their program (its hash)"])
}

fn another_seed() -> Result<(), String> {
    let ended = run(two_kinds(&train_gpt(), &train_gpt(), &["--seed", "2"]))?;
    badly(&ended)?;
    has(&ended.err, &["ranks 0 and 1 differ in their options", "seed: 1", "seed: 2"])
}
