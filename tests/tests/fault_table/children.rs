//! What needs a process of its own: this program again, told by its environment which part to play.

use std::env;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::runner::Happened;
use crate::{processes, without_memory};

const ROLE: &str = "HSDP_FAULT_TABLE_ROLE";

/// How a child says what it was told, after which it says how many microseconds that took.
const TOLD: &str = "told: ";

/// Commits a fault and checks what follows.
type Play = fn() -> Happened;

/// Roles of a child process.
const ROLES: [(&str, Play); 5] = [
    ("without_memory", without_memory::refused_by_the_allocator),
    ("panicking", processes::panic_in_a_thread),
    ("stopped", processes::train_slowly),
    ("stopped_while_coming", processes::come_slowly),
    ("forking", processes::fork_after_init),
];

/// What this process is to play, if it is a child.
pub(crate) fn role() -> Option<String> {
    env::var(ROLE).ok()
}

/// Plays it, and says what happened.
///
/// # Panics
/// If there is no such role, or what it claims is not so.
pub(crate) fn play(role: &str) {
    let (_, run) = ROLES.iter().find(|(name, _)| *name == role).expect("a role");
    let Happened { told, took } = run();
    say(&format!("{TOLD}{} {told}", took.as_micros()));
}

/// Says something to the parent.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// What happened in a child.
///
/// # Panics
/// If it failed: with what it said.
pub(crate) fn plays(role: &str) -> Happened {
    let (child, said) = start(role);
    ended(child, said)
}

/// Starts a child, whose lines can be read.
pub(crate) fn start(role: &str) -> (Running, BufReader<ChildStdout>) {
    let program = env::current_exe().expect("this program");
    let mut command = Command::new(program);
    // What symbols a backtrace has is found out before a panic is told to anybody.
    command
        .env(ROLE, role)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("a child");
    let said = BufReader::new(child.stdout.take().expect("it is piped"));
    (Running(child), said)
}

/// A child, which is ended with the row that it belongs to.
pub(crate) struct Running(Child);

impl Running {
    pub(crate) fn id(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).expect("a process id"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What happened in a child that is left to itself from now on.
///
/// # Panics
/// If it failed: with what it said.
pub(crate) fn ended(mut child: Running, said: BufReader<ChildStdout>) -> Happened {
    let lines: Vec<String> = said.lines().map_while(Result::ok).collect();
    let mut complaint = String::new();
    if let Some(mut stderr) = child.0.stderr.take() {
        let _ = stderr.read_to_string(&mut complaint);
    }
    let status = child.0.wait().expect("it ends");
    assert!(status.success(), "the child ended with {status}: {}{complaint}", lines.join("\n"));
    let told = lines.iter().find_map(|line| line.strip_prefix(TOLD)?.split_once(' '));
    let (micros, told) = told.unwrap_or_else(|| panic!("the child said only {lines:?}"));
    let took = Duration::from_micros(micros.parse().expect("a number"));
    Happened::after(&told, took)
}
