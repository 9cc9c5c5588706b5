//! Runs jobs.

use std::fmt::Display;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::program::{Said, output};

/// Longer than any step of these tests takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The arguments of a job that needs no MPI.
pub(crate) const NCCL: [&str; 3] = ["launch", "--comm", "nccl"];

/// Returns the program, with the variables that Open MPI requires of root, and without those of a
/// job in which this test may run.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hsdp"));
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR"] {
        command.env_remove(name);
    }
    command.args(arguments).stdin(Stdio::null());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

/// Runs ranks to their end. Each runs a script of `sh`.
pub(crate) fn ran(options: &[&str], script: &str) -> Said {
    output(&mut command(&[options, &["--", "sh", "-c", script]].concat()))
}

/// Returns a script of `sh` that begins a job by `exec "$@"`. The variables of the job are not set.
pub(crate) fn in_shell(script: &str, job: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(job.get_program()).args(job.get_args());
    shell
}

/// Returns the beginning of a script of `sh`. With `up`, a rank reports that it is up. With
/// `others`, a rank that fails waits for the ranks in `others`. Messages of the shell about signals
/// are not shown.
pub(crate) fn meeting(folder: &Path, others: &[u32]) -> String {
    let file = |rank: &dyn Display| format!("{}/{rank}", folder.display());
    let there: Vec<String> = others.iter().map(|rank| format!("[ -e {} ]", file(rank))).collect();
    let others = there.join(" && ");
    format!(
        "exec 2>/dev/null; rank=${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-$RANK}}}}
         up() {{ : > {}; }}
         others() {{ until {others}; do sleep 0.01; done; }}
        ",
        file(&"$rank")
    )
}

/// A running job.
pub(crate) struct Job {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Job {
    pub(crate) fn start(options: &[&str], script: &str) -> Self {
        Self::spawn(command(&[options, &["--", "sh", "-c", script]].concat()))
    }

    pub(crate) fn spawn(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, stdout }
    }

    /// Returns the next lines of its stdout, in order of rank.
    pub(crate) fn lines(&mut self, count: usize) -> Vec<String> {
        let mut lines: Vec<String> = (0..count)
            .map(|_| {
                let mut line = String::new();
                self.stdout.read_line(&mut line).expect("a line");
                line
            })
            .collect();
        lines.sort();
        lines
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a number of a process");
        kill(Pid::from_raw(pid), signal).expect("it is there");
    }

    /// Returns its exit code and its stderr, after it has ended while nobody read its stdout.
    pub(crate) fn ended_unread(mut self) -> (Option<i32>, String) {
        let code = until_ended(&mut self.child);
        let mut told = String::new();
        let stderr = self.child.stderr.take();
        stderr.expect("piped").read_to_string(&mut told).expect("UTF-8");
        (code, told)
    }

    /// Returns its exit code and its stdout, after it has ended while nobody read its stderr.
    pub(crate) fn ended_untold(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.stdout.read_to_string(&mut said).expect("UTF-8");
        (until_ended(&mut self.child), said)
    }

    /// Returns its exit code and the rest of its output.
    pub(crate) fn ended(mut self) -> Said {
        let mut said = String::new();
        self.stdout.read_to_string(&mut said).expect("UTF-8");
        let output = self.child.wait_with_output().expect("it ends");
        (output.status.code(), said, String::from_utf8(output.stderr).expect("UTF-8"))
    }
}

/// Waits until a program has ended, and returns its exit code.
pub(crate) fn until_ended(child: &mut Child) -> Option<i32> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            return status.code();
        }
        if began.elapsed() >= PATIENCE {
            // Its ranks end with it.
            child.kill().expect("it is there");
            panic!("the job does not end");
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// Waits until these processes are gone, or are zombies.
pub(crate) fn until_gone(pids: &[String]) {
    let began = Instant::now();
    while let Some(pid) = pids.iter().find(|pid| is_alive(pid)) {
        assert!(began.elapsed() < PATIENCE, "process {pid} is left behind");
        std::thread::yield_now();
    }
}

fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    // The name may contain any characters. The state follows its last bracket.
    stat.is_ok_and(|stat| !stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")))
}
