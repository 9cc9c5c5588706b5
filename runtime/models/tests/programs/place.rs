//! Programs that run, and a folder for short runs of `train_gpt`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::{example, stderr};

/// The longest wait of a test.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that runs. It is killed if a test ends before it.
pub(crate) struct Running(Option<Child>);

impl Running {
    pub(crate) fn of(mut program: Command) -> Self {
        program.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(Some(program.spawn().expect("the program starts")))
    }

    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("it has not ended")
    }

    pub(crate) fn process(&mut self) -> u32 {
        self.child().id()
    }

    pub(crate) fn send(&mut self, signal: Signal) {
        kill(self.pid(), signal).expect("it runs");
    }

    /// Stops it, and returns when all its threads stand still.
    pub(crate) fn stop(&mut self) {
        self.send(Signal::SIGSTOP);
        let stopped = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED));
        assert!(matches!(stopped, Ok(WaitStatus::Stopped(..))), "{stopped:?}");
    }

    fn pid(&mut self) -> Pid {
        Pid::from_raw(i32::try_from(self.process()).expect("a number of a process"))
    }

    /// Returns the lines of its stderr as they are written, until it ends.
    pub(crate) fn stderr_lines(&mut self) -> Receiver<String> {
        let stderr = self.child().stderr.take().expect("a pipe that is not read yet");
        let (pass_on, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                // Reading goes on when the test no longer listens, because a full pipe would block
                // the program.
                let _ = pass_on.send(line);
            }
        });
        lines
    }

    /// Waits until it ends.
    pub(crate) fn ended(mut self) -> Output {
        let child = self.0.take().expect("it has not ended");
        child.wait_with_output().expect("it ends")
    }

    /// Waits until `is_done`.
    pub(crate) fn until(&mut self, what: &str, is_done: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_done() {
            assert!(begun.elapsed() < PATIENCE, "{what} does not come");
            assert!(self.child().try_wait().expect("a child").is_none(), "it ended before {what}");
            thread::park_timeout(Duration::from_millis(1));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A folder with a text and the files of a run.
pub(crate) struct Place {
    folder: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let folder = TempDir::new().expect("a folder");
        let text = "how much wood would a woodchuck chuck? ".repeat(20);
        fs::write(folder.path().join("text"), text).expect("a file");
        Self { folder }
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    pub(crate) fn start(&self, arguments: &[&str]) -> Running {
        self.start_as(example("train_gpt"), arguments)
    }

    /// Starts a program that is `train_gpt`, or becomes it.
    pub(crate) fn start_as(&self, mut program: Command, arguments: &[&str]) -> Running {
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
        program.args(arguments);
        Running::of(program)
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.start(arguments).ended()
    }

    pub(crate) fn steps(&self) -> Vec<Value> {
        steps(&self.out())
    }

    /// Returns the contents of the files of a run, by name.
    pub(crate) fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let entries =
            fs::read_dir(self.out()).expect("a folder").map(|entry| entry.expect("there"));
        let file = |entry: fs::DirEntry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            Some((name, fs::read(entry.path()).ok()?))
        };
        entries.filter_map(file).collect()
    }

    /// Waits until a step is in a run's metrics.
    pub(crate) fn wait_for(&self, step: usize, run: &mut Running) {
        run.until(&format!("step {step}"), || self.steps().len() > step);
    }
}

/// Returns the steps in the metrics of a run, without the time that they took.
pub(crate) fn steps(out: &Path) -> Vec<Value> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let step = |line: &str| {
        let mut line: Value = serde_json::from_str(line).ok()?;
        line.as_object_mut()?.remove("seconds");
        Some(line)
    };
    text.lines().filter_map(step).collect()
}

pub(crate) fn ended_well(output: &Output) {
    assert!(output.status.success(), "{}\n{}", output.status, stderr(output));
}

pub(crate) fn numbers(steps: &[Value]) -> Vec<u64> {
    steps.iter().map(|step| step["step"].as_u64().expect("a number")).collect()
}

/// Returns the names of the checkpoints of a run.
pub(crate) fn saved(out: &Path) -> Vec<String> {
    checkpoints(&out.join("checkpoints"))
}

/// Returns the names of the checkpoints in a folder.
pub(crate) fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let names = entries.map(|it| it.expect("there").file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
    names.sort();
    names
}
