//! Jobs whose processes have other inputs, and a folder that is in use or broken: all processes end
//! in time, and one line names the rank and the problem.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};

use crate::Named;
use crate::faults::{folder, four, steps};
use crate::job::{Ended, Job, TEXT, built, has, mpirun, run, train_gpt};

pub(crate) const TRIALS: &[Named] = &[
    ("inputs::a_rank_without_its_text_is_named_at_once", no_text),
    ("inputs::ranks_with_other_texts_do_not_train", other_text),
    ("inputs::ranks_with_one_text_at_two_paths_train", other_path),
    ("inputs::ranks_with_other_tokenizers_do_not_train", other_tokenizer),
    ("inputs::ranks_with_other_configs_do_not_train", other_config),
    ("inputs::a_second_job_in_one_folder_is_refused", second_job),
    ("inputs::warnings_name_their_rank", warnings),
];

/// A job that is refused has ended so long after its start, though its deadline is two minutes.
const SOON: Duration = Duration::from_secs(20);

/// Two ranks, each with a text in its own working directory, by name.
fn with_texts(texts: [&Path; 2]) -> Result<Ended, String> {
    let mut command = mpirun();
    for text in texts {
        let folder = text.parent();
        let name = text.file_name();
        let folder = folder.ok_or("no folder")?;
        let name = name.ok_or("no name")?;
        command.args(["-n", "1", "-wdir"]).arg(folder).arg(train_gpt()).arg("--data").arg(name);
        command.args(["--comm", "mpi", "--mesh", "1x2", "--steps", "2", "--layers", "1", ":"]);
    }
    run(command)
}

/// Writes the text of these tests to a file, with another word in place of one.
fn write(file: &Path, [word, other]: [&str; 2]) -> Result<(), String> {
    let text = fs::read_to_string(TEXT).map_err(|error| error.to_string())?;
    fs::create_dir_all(file.parent().ok_or("no folder")?).map_err(|error| error.to_string())?;
    fs::write(file, text.replace(word, other)).map_err(|error| error.to_string())
}

/// The job has told this once, with exit code 2, and soon.
fn refused(ended: &Ended, told: &str, started: Instant) -> Result<(), String> {
    let took = ended.at - started;
    match (ended.err.matches(told).count(), ended.code) {
        (1, Some(2)) if took < SOON => Ok(()),
        _ => Err(format!("exit code {:?} after {took:?}: {}", ended.code, ended.err)),
    }
}

fn no_text() -> Result<(), String> {
    let out = folder()?;
    let started = Instant::now();
    let ended = with_texts([Path::new(TEXT), &out.path().join("none")])?;
    refused(&ended, "train_gpt: rank 1: none: No such file", started)
}

fn other_text() -> Result<(), String> {
    let out = folder()?;
    let started = Instant::now();
    let [first, second] = ["first", "second"].map(|name| out.path().join(name).join("text"));
    write(&first, ["thee", "thee"])?;
    write(&second, ["thee", "eeth"])?;
    let ended = with_texts([&first, &second])?;
    refused(&ended, "train_gpt: ranks 0 and 1 differ in their text: ", started)
}

fn other_path() -> Result<(), String> {
    let out = folder()?;
    let copy = out.path().join("copy");
    write(&copy, ["thee", "thee"])?;
    let ended = with_texts([Path::new(TEXT), &copy])?;
    if ended.code == Some(0) { Ok(()) } else { Err(ended.err) }
}

/// Copies a model, a tokenizer of letters and a text to a folder.
fn write_model(folder: &Path, letters: [&str; 2]) -> Result<(), String> {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../runtime/models/tests/golden_llama/plain");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(golden).join("model").join(name), folder.join(name))
            .map_err(|error| format!("{name}: {error}"))?;
    }
    let [first, second] = letters;
    let tokenizer = format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": {{"type": "Whitespace"}}, "post_processor": null,
            "decoder": null, "model": {{"type": "WordLevel", "unk_token": "?",
            "vocab": {{"?": 0, "{first}": 1, "{second}": 2}}}}}}"#
    );
    let written = fs::write(folder.join("tokenizer.json"), tokenizer);
    let written = written.and_then(|()| fs::write(folder.join("text"), "a b b a ".repeat(100)));
    written.map_err(|error| error.to_string())
}

/// Runs two ranks, each with a model, a tokenizer and a text in its own working directory.
fn with_models(folders: [&Path; 2]) -> Result<Ended, String> {
    let mut command = mpirun();
    for folder in folders {
        command.args(["-n", "1", "-wdir"]).arg(folder).arg(built("examples/finetune"));
        command.args(["--comm", "mpi", "--mesh", "1x2", "--model", ".", "--data", "text"]);
        command.args(["--steps", "2", "--context", "8", "--batch", "1", ":"]);
    }
    run(command)
}

/// The tokenizers have the same tokens in another order.
fn other_tokenizer() -> Result<(), String> {
    let first = folder()?;
    let second = folder()?;
    let started = Instant::now();
    write_model(first.path(), ["a", "b"])?;
    write_model(second.path(), ["b", "a"])?;
    let ended = with_models([first.path(), second.path()])?;
    refused(&ended, "finetune: ranks 0 and 1 differ in their data: ", started)?;
    // Equal ones at two paths train.
    write_model(second.path(), ["a", "b"])?;
    let ended = with_models([first.path(), second.path()])?;
    if ended.code == Some(0) { Ok(()) } else { Err(ended.err) }
}

/// No tensor shows the padding token.
fn other_config() -> Result<(), String> {
    let first = folder()?;
    let second = folder()?;
    let started = Instant::now();
    write_model(first.path(), ["a", "b"])?;
    write_model(second.path(), ["a", "b"])?;
    let path = second.path().join("config.json");
    let text = fs::read_to_string(&path).map_err(|error| error.to_string())?;
    let other = text.replace("\"pad_token_id\": null", "\"pad_token_id\": 3");
    fs::write(&path, other).map_err(|error| error.to_string())?;
    let ended = with_models([first.path(), second.path()])?;
    refused(&ended, "finetune: ranks 0 and 1 differ in their data: ", started)
}

fn second_job() -> Result<(), String> {
    let out = folder()?;
    let first = Job::start(four(&["--steps", "100000"], out.path()))?;
    first.until("a step", || (steps(out.path()) >= 1).then_some(()))?;
    let started = Instant::now();
    let told = format!(") writes to {}", out.path().display());
    refused(&run(four(&["--steps", "2"], out.path()))?, &told, started)?;
    if out.path().join("flight").exists() {
        return Err("the second job has written flight records".to_owned());
    }
    // The first goes on.
    let made = steps(out.path());
    first.until("another step", || (steps(out.path()) > made).then_some(()))
}

fn warnings() -> Result<(), String> {
    let out = folder()?;
    // The others wait for rank 1 so long that each of them warns.
    let late = ["--fault", "rank 1, step 1, unit 1, reduce: delay of 6s"];
    let arguments = ["--steps", "100000", "--save-every", "3"];
    let command = four(&[arguments.as_slice(), &late].concat(), out.path());
    let job = Job::start(command)?;
    let processes = job.processes(4)?;
    job.until("a step", || (steps(out.path()) >= 1).then_some(()))?;
    // No save succeeds from here on.
    let checkpoints = out.path().join("checkpoints");
    fs::remove_dir_all(&checkpoints).map_err(|error| error.to_string())?;
    fs::write(&checkpoints, "").map_err(|error| error.to_string())?;
    for (name, kept) in [
        ("warnings.jsonl", "saving at step "),
        ("warnings.jsonl", "ranks are late"),
        ("warnings-rank-3.jsonl", "ranks are late"),
    ] {
        let all = || fs::read_to_string(out.path().join(name)).unwrap_or_default();
        job.until(kept, || all().contains(kept).then_some(()))?;
    }
    kill(processes[2], Signal::SIGTERM).map_err(|error| error.to_string())?;
    let ended = job.end()?;
    for rank in [0, 2, 3] {
        has(&ended.err, &[&format!("train_gpt: rank {rank}: warning: ranks are late")])?;
    }
    // All ranks have the same result, and the first one says so.
    has(&ended.err, &["train_gpt: rank 0: warning: a checkpoint failed"])?;
    if let Some(rank) = (1..4).find(|rank| {
        ended.err.contains(&format!("train_gpt: rank {rank}: warning: a checkpoint failed"))
    }) {
        return Err(format!("rank {rank} says so, too: {}", ended.err));
    }
    has(&ended.err, &["and the last checkpoint was not saved: saving at step "])?;
    if ended.code == Some(1) { Ok(()) } else { Err(format!("exit code {:?}", ended.code)) }
}
