//! The program `verify`: the examples equal the same training without the runtime, on many meshes.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use hsdp_train::testing::{bounded, on_a_full_disk, refusal};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_verify");

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{error}", output.status);
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

const MESHES: [&str; 6] = ["1x1", "1x4", "2x2", "4x1", "2x3", "3x2"];
const SMALL: [&str; 8] = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16"];
const EXACTLY: &str = "losses, gradients and parameters bit-identical";
const WITHIN: &str = "gradients of 3 steps within";

/// Trains a GPT for three steps. Asserts the text of the verification, and that parameters were
/// updated.
fn verify(arguments: &[&str], phrase: &str) {
    let folder = TempDir::new().expect("a folder");
    let [text, out] = ["text", "out"].map(|name| folder.path().join(name).display().to_string());
    fs::write(&text, "how much wood would a woodchuck chuck? ".repeat(20)).expect("a file");
    let gpt = ["gpt", "--steps", "3", "--data", &text, "--out", &out];
    let said = stdout(&run(&[&gpt[..], &SMALL, arguments].concat()));
    assert!(said.contains(phrase), "{arguments:?}:\n{said}");
    assert!(said.contains("exactly as planned"), "{arguments:?}:\n{said}");
    let summary = fs::read_to_string(folder.path().join("out/summary.json")).expect("a summary");
    let read: Value = serde_json::from_str(&summary).expect("JSON");
    assert!(read["applied"].as_u64() > Some(0), "{arguments:?}: {summary}");
    let verified = read["verified"].as_str();
    assert!(verified.is_some_and(|text| text.contains(phrase)), "{arguments:?}: {summary}");
}

#[test]
fn a_sharded_gpt_equals_its_unsharded_twin() {
    MESHES.iter().for_each(|mesh| verify(&["--mesh", mesh], EXACTLY));
}

#[test]
fn so_it_does_with_parameters_of_16_bits() {
    MESHES.iter().for_each(|mesh| verify(&["--mesh", mesh, "--param-dtype", "bf16"], EXACTLY));
    verify(&["--param-dtype", "f16"], WITHIN);
}

#[test]
fn so_it_does_with_a_wire_of_16_bits() {
    MESHES.iter().for_each(|mesh| verify(&["--mesh", mesh, "--reduce-dtype", "f16"], WITHIN));
    verify(&["--reduce-dtype", "bf16"], WITHIN);
}

#[test]
fn so_it_does_in_every_mode_of_accumulation() {
    for mode in ["every", "local"] {
        let several = ["--accumulation", mode, "--microbatches", "3"];
        verify(&several, EXACTLY);
        verify(&[&several[..], &["--param-dtype", "f16"]].concat(), WITHIN);
    }
}

/// The other ranks waited for a year.
#[test]
fn the_deadline_of_a_verification_counts() {
    let frozen = ["--fault", "rank 1, step 1, unit 0, reduce: freeze", "--deadline", "2"];
    let gpt = ["gpt", "--mesh", "1x2", "--steps", "3"];
    let mut command = bounded(PROGRAM);
    let output = command.args([&gpt[..], &SMALL, &frozen].concat()).output();
    let output = output.expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("rank 1"), "{said}");
}

#[test]
fn contrastive_ranks_do_what_one_process_does() {
    let small = ["contrastive", "--steps", "5", "--batch", "24", "--width", "16"];
    for dtype in ["f32", "f64"] {
        for (ranks, phrase) in
            [("1", "bit-identical"), ("2", "within"), ("4", "within"), ("3", "within")]
        {
            let said = stdout(&run(&[&small[..], &["--ranks", ranks, "--dtype", dtype]].concat()));
            assert!(said.contains(&format!("of 5 steps {phrase}")), "{ranks}, {dtype}: {said}");
        }
    }
}

#[test]
fn a_ratio_is_compared_and_the_time_accounted_for() {
    let small = ["cost", "--mesh", "1x2", "--rounds", "1", "--steps", "2"];
    for (most, code) in [("1e9", 0), ("0", 1), ("nan", 1)] {
        let output = run(&[&small[..], &["--at-most", most]].concat());
        let [said, failed] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
        assert_eq!(output.status.code(), Some(code), "at most {most}: {said}");
        assert_eq!(failed.lines().count(), usize::from(code == 1), "at most {most}: {failed}");
        assert_eq!(failed.contains("the ratio is "), code == 1, "at most {most}: {failed}");
        let (_, sharded) = said.split_once("a sharded step").expect("an account");
        for part in ["forward", "backward", "gather", "reduce", "finish", "optimizer"] {
            assert!(sharded.contains(&format!("{part}: ")), "no {part} in {sharded}");
        }
    }
}

/// The program is stopped again and again: some rank waits at one in five moments or more.
#[test]
fn a_warning_is_shown_while_the_cost_is_measured() {
    // It would run for days; it is killed as soon as it has shown one.
    let long =
        ["cost", "--only", "sharded", "--mesh", "1x4", "--rounds", "1", "--steps", "1000000"];
    let mut program = Command::new(PROGRAM);
    program.args(long).env("RAYON_NUM_THREADS", "1").stderr(Stdio::piped());
    let mut program = program.spawn().expect("the program starts");
    let stderr = BufReader::new(program.stderr.take().expect("a pipe"));
    let (pass_on, lines) = mpsc::channel();
    thread::spawn(move || {
        stderr.lines().map_while(Result::ok).try_for_each(|line| pass_on.send(line))
    });
    let process = Pid::from_raw(i32::try_from(program.id()).expect("a number of a process"));
    let shown = (0..100).find_map(|_| {
        kill(process, Signal::SIGSTOP).expect("it runs");
        // Longer than a rank that waits takes for a hiccup.
        thread::park_timeout(Duration::from_millis(800));
        kill(process, Signal::SIGCONT).expect("it stands still");
        lines.recv_timeout(Duration::from_millis(50)).ok()
    });
    program.kill().and_then(|()| program.wait()).expect("it runs");
    let shown = shown.expect("a warning");
    let warning = "verify: warning: the process was stopped, or got no processor time";
    assert!(shown.starts_with(warning), "{shown}");
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    const MOST: &str = "18446744073709551615";
    let large = ["gpt", "--mesh", "1x1", "--width", "1024", "--layers", "8", "--batch", "1"];
    let large = [&large[..], &["--context", "8"]].concat();
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().display().to_string();
    let resumed = ["gpt", "--resume", "--out", &out];
    for (arguments, phrase) in [
        (&[][..], "a command is missing"),
        (&["gpt", "--colour", "blue"], "--colour"),
        (&resumed, "--resume: the unsharded twin begins at the first step"),
        (&large, "for the unsharded twin"),
        (&["contrastive", "--batch", "16777216"], "for the comparison of all pairs"),
        (&["contrastive", "--ranks", "3"], "cannot be shared evenly by 3 ranks"),
        (&["cost", "--rounds", "0"], "--rounds"),
        (&["cost", "--steps", "1"], "--steps"),
        (&["cost", "--rounds", MOST], "from 1 to 1000"),
        (&["cost", "--steps", MOST], "from 2 to 1000000"),
        (&["cost", "--mesh", "60000x60000"], "3600000000 ranks: at most 64 run as threads"),
    ] {
        let error = refusal(bounded(PROGRAM).args(arguments));
        assert!(error.contains(phrase), "{arguments:?}: {error}");
    }
}

#[test]
fn a_full_disk_is_one_line_and_no_success() {
    for arguments in [
        &["contrastive", "--steps", "2"][..],
        &["cost", "--mesh", "1x1", "--rounds", "1", "--steps", "2"],
    ] {
        let output = on_a_full_disk(bounded(PROGRAM).args(arguments)).expect("it starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
        assert!(error.contains("cannot print to stdout: No space left"), "{error}");
    }
}
