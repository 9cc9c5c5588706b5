//! Jobs under mpirun: started, waited for within a time, and killed whatever happens.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Nothing here takes half of it.
const LIMIT: Duration = Duration::from_secs(100);

/// A job that runs.
pub(crate) struct Job {
    mpirun: Child,
    started: Instant,
}

/// How a job ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) at: Instant,
}

/// `mpirun`, for as many processes as are asked for, on this machine.
pub(crate) fn mpirun() -> Command {
    let mut command = Command::new("mpirun");
    command
        .args(["--oversubscribe", "--bind-to", "none"])
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null());
    command
}

/// The example that trains, built with `cargo build -p hsdp-candle --features mpi --example train_gpt`.
pub(crate) fn train_gpt() -> PathBuf {
    let conformance = Path::new(env!("CARGO_BIN_EXE_conformance"));
    let folder = conformance.parent().expect("programs are in a folder");
    folder.join("examples/train_gpt")
}

/// The program, built with `cargo build -p hsdp-cli`.
#[cfg(feature = "nccl")]
pub(crate) fn hsdp() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_conformance")).with_file_name("hsdp")
}

impl Job {
    pub(crate) fn start(mut command: Command) -> Result<Self, String> {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mpirun = command.spawn().map_err(|error| format!("mpirun: {error}"))?;
        Ok(Self { mpirun, started: Instant::now() })
    }

    /// The processes that mpirun has started, in the order of their numbers, when there are `count`.
    pub(crate) fn processes(&self, count: usize) -> Result<Vec<Pid>, String> {
        self.until(|| {
            let children = children(self.mpirun.id().cast_signed());
            (children.len() == count).then_some(children)
        })
    }

    /// Whether none of its processes runs any more.
    pub(crate) fn has_ended(&self) -> bool {
        children(self.mpirun.id().cast_signed()).is_empty()
    }

    /// Looks again and again for what is there at last.
    pub(crate) fn until<T>(&self, look: impl Fn() -> Option<T>) -> Result<T, String> {
        while self.started.elapsed() < LIMIT {
            if let Some(found) = look() {
                return Ok(found);
            }
            thread::yield_now();
        }
        Err("what is waited for does not come".to_owned())
    }

    /// Waits for the end, and gives what was written. What was written is read meanwhile.
    pub(crate) fn end(mut self) -> Result<Ended, String> {
        let (out, err) = (self.mpirun.stdout.take(), self.mpirun.stderr.take());
        let read = |stream: Option<Box<dyn std::io::Read + Send>>| {
            thread::spawn(move || {
                let mut text = Vec::new();
                stream.map(|mut stream| stream.read_to_end(&mut text));
                String::from_utf8_lossy(&text).into_owned()
            })
        };
        let out = read(out.map(|out| Box::new(out) as _));
        let err = read(err.map(|err| Box::new(err) as _));
        let status = loop {
            match self.mpirun.try_wait().map_err(|error| error.to_string())? {
                Some(status) => break status,
                None if self.started.elapsed() > LIMIT => {
                    return Err(format!("it runs for {LIMIT:?}"));
                }
                None => thread::yield_now(),
            }
        };
        let at = Instant::now();
        let text = |thread: thread::JoinHandle<String>| thread.join().unwrap_or_default();
        Ok(Ended { code: status.code(), out: text(out), err: text(err), at })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in children(self.mpirun.id().cast_signed()) {
            let _ = kill(child, Signal::SIGKILL);
        }
        let _ = self.mpirun.kill();
        let _ = self.mpirun.wait();
    }
}

/// Runs a job to its end.
pub(crate) fn run(command: Command) -> Result<Ended, String> {
    Job::start(command)?.end()
}

/// Whether `text` has all of `parts`.
pub(crate) fn has(text: &str, parts: &[&str]) -> Result<(), String> {
    match parts.iter().find(|part| !text.contains(**part)) {
        None => Ok(()),
        Some(part) => Err(format!("`{part}` is missing in:\n{text}")),
    }
}

/// The processes that a process has started.
pub(crate) fn children(of: i32) -> Vec<Pid> {
    let listed = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    let numbers = listed.split_ascii_whitespace().filter_map(|number| number.parse().ok());
    numbers.map(Pid::from_raw).collect()
}
