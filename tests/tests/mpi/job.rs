//! Jobs under mpirun: started, waited for within a time, and killed whatever happens.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Nothing here takes half of it.
const LIMIT: Duration = Duration::from_secs(100);

/// Between looks at a job the processes have all cores.
const BETWEEN_LOOKS: Duration = Duration::from_millis(2);

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

/// Whose `mpirun` it is: that of PATH, and programs are built for its library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    OpenMpi,
    Mpich,
}

/// None where there is no `mpirun`.
pub(crate) fn family() -> Option<Family> {
    let output = Command::new("mpirun").arg("--version").output().ok()?;
    let is_mpich = String::from_utf8_lossy(&output.stdout).contains("HYDRA");
    Some(if is_mpich { Family::Mpich } else { Family::OpenMpi })
}

/// `mpirun`, for as many processes as are asked for, on this machine.
pub(crate) fn mpirun() -> Command {
    let mut command = Command::new("mpirun");
    // MPICH's counts no cores, and binds nothing.
    if family() == Some(Family::OpenMpi) {
        command.args(["--oversubscribe", "--bind-to", "none"]);
    }
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null());
    command
}

/// `hsdp launch`, built with `cargo build -p hsdp-cli`, for so many processes: it starts `mpirun`.
pub(crate) fn hsdp_launch(processes: &str) -> Command {
    let mut command = Command::new(built("hsdp"));
    command.args(["launch", "-n", processes, "--"]).stdin(Stdio::null());
    for (name, value) in mpirun().get_envs() {
        command.envs(value.map(|value| (name, value)));
    }
    command
}

/// The example that trains, built with `cargo build -p hsdp-models --features mpi --example
/// train_gpt`.
pub(crate) fn train_gpt() -> PathBuf {
    built("examples/train_gpt")
}

/// A text that does not change. The default text of `train_gpt` is the project's pages, which may
/// be edited while ranks read them.
pub(crate) const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi/text.txt");

/// The options of `train_gpt` for that text, and for short sequences: its messages are those of
/// long ones, with an eighth of the arithmetic.
pub(crate) const ON_TEXT: [&str; 6] = ["--data", TEXT, "--batch", "1", "--context", "32"];

/// A program beside those of these tests.
pub(crate) fn built(path: &str) -> PathBuf {
    let conformance = Path::new(env!("CARGO_BIN_EXE_conformance"));
    conformance.parent().expect("programs are in a folder").join(path)
}

impl Job {
    pub(crate) fn start(mut command: Command) -> Result<Self, String> {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mpirun = command.spawn().map_err(|error| format!("mpirun: {error}"))?;
        Ok(Self { mpirun, started: Instant::now() })
    }

    /// The processes that mpirun has started, in the order of their numbers, when there are
    /// `count`.
    pub(crate) fn processes(&self, count: usize) -> Result<Vec<Pid>, String> {
        self.until(&format!("{count} processes"), || {
            let started = started(self.mpirun.id());
            (started.len() == count).then_some(started)
        })
    }

    /// Whether none of its processes runs any more. One that has ended is there until mpirun has
    /// looked after it, which sleeps for seconds where one has been killed.
    pub(crate) fn has_ended(&self) -> bool {
        !started(self.mpirun.id()).into_iter().any(runs)
    }

    /// Looks again and again for what is there at last. An error says what is `awaited`, and what
    /// the processes are doing instead.
    pub(crate) fn until<T>(
        &self,
        awaited: &str,
        look: impl Fn() -> Option<T>,
    ) -> Result<T, String> {
        while self.started.elapsed() < LIMIT {
            if let Some(found) = look() {
                return Ok(found);
            }
            pause(BETWEEN_LOOKS);
        }
        let doing: String = started(self.mpirun.id()).into_iter().map(doing).collect();
        Err(format!("after {LIMIT:?} there is no sign of {awaited}; mpirun's processes:\n{doing}"))
    }

    /// Waits for the end, and gives what was written. What was written is read meanwhile.
    pub(crate) fn end(mut self) -> Result<Ended, String> {
        let out = self.mpirun.stdout.take();
        let err = self.mpirun.stderr.take();
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
                None => pause(BETWEEN_LOOKS),
            }
        };
        let at = Instant::now();
        let text = |thread: thread::JoinHandle<String>| thread.join().unwrap_or_default();
        Ok(Ended { code: status.code(), out: text(out), err: text(err), at })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for process in started(self.mpirun.id()) {
            let _ = kill(process, Signal::SIGKILL);
        }
        let _ = self.mpirun.kill();
        let _ = self.mpirun.wait();
    }
}

/// Runs a job to its end.
pub(crate) fn run(command: Command) -> Result<Ended, String> {
    Job::start(command)?.end()
}

/// Waits by the clock.
pub(crate) fn pause(time: Duration) {
    let (_says, hears) = mpsc::channel::<()>();
    let _ = hears.recv_timeout(time);
}

/// Whether `text` has all of `parts`.
pub(crate) fn has(text: &str, parts: &[&str]) -> Result<(), String> {
    match parts.iter().find(|part| !text.contains(**part)) {
        None => Ok(()),
        Some(part) => Err(format!("`{part}` is missing in:\n{text}")),
    }
}

/// The processes of a job, in the order of their numbers: what starts them starts one more program
/// between, or none.
fn started(by: u32) -> Vec<Pid> {
    let ends = |child: Pid| {
        let below = started(child.as_raw().unsigned_abs());
        if below.is_empty() { vec![child] } else { below }
    };
    children(by).into_iter().flat_map(ends).collect()
}

/// Whether a process is there and has not ended.
pub(crate) fn runs(process: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name of the program is in parentheses, and may have anything in it.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Returns the names and states of a process's threads, and where they sleep in the kernel.
fn doing(process: Pid) -> String {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let threads = threads.map(|thread| {
        let read = |file| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        let stat = read("stat");
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        format!("{} {} {}", read("comm").trim(), state.unwrap_or('?'), read("wchan"))
    });
    format!("{process}: {}\n", threads.collect::<Vec<_>>().join("; "))
}

fn children(of: u32) -> Vec<Pid> {
    let listed = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    let numbers = listed.split_ascii_whitespace().filter_map(|number| number.parse().ok());
    numbers.map(Pid::from_raw).collect()
}
