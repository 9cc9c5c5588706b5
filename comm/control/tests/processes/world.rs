//! Processes of a world, with the test as their launcher.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::address::free_address;

/// The options with which processes are started.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    size: u32,
    part: &'static str,
    address: SocketAddr,
    changes: Vec<(&'static str, String)>,
}

impl Launch {
    /// A world of `size` ranks, at a free address.
    pub(crate) fn new(size: u32, part: &'static str) -> Self {
        Self { size, part, address: free_address(), changes: Vec::new() }
    }

    /// The same processes, in another world.
    pub(crate) fn elsewhere(&self) -> Self {
        Self { address: free_address(), ..self.clone() }
    }

    /// The same, with another part.
    pub(crate) fn part(&self, part: &'static str) -> Self {
        Self { part, ..self.clone() }
    }

    /// The same, with another environment; a variable without a value is not set.
    pub(crate) fn set(&self, name: &'static str, value: impl ToString) -> Self {
        let mut changed = self.clone();
        changed.changes.push((name, value.to_string()));
        changed
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts one process.
    pub(crate) fn process(&self, rank: u32) -> Process {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command
            .env("HSDP_TEST_PART", self.part)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", self.size.to_string())
            .env("MASTER_ADDR", self.address.ip().to_string())
            .env("MASTER_PORT", self.address.port().to_string())
            .env("HSDP_JOB_SECRET", "5a".repeat(32));
        for (name, value) in &self.changes {
            if value.is_empty() {
                command.env_remove(name)
            } else {
                command.env(name, value)
            };
        }
        Process::start(command)
    }

    /// Starts all ranks.
    pub(crate) fn world(&self) -> Vec<Process> {
        (0..self.size).map(|rank| self.process(rank)).collect()
    }

    /// Waits until a process listens at the coordinator's address.
    pub(crate) fn wait_until_listened_to(&self) {
        let started = Instant::now();
        while let Err(error) = TcpStream::connect(self.address) {
            assert!(started.elapsed() < Duration::from_secs(20), "{}: {error}", self.address);
        }
    }
}

/// A process. It is killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    said: BufReader<ChildStdout>,
    started: Instant,
}

/// The end of a process.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) pid: u32,
    pub(crate) status: String,
    pub(crate) said: String,
    pub(crate) complaint: String,
    /// The time from its start until its end was noticed.
    pub(crate) after: Duration,
}

impl Process {
    fn start(mut command: Command) -> Self {
        let started = Instant::now();
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().expect("a process");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, said, started }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Reads until this line, and returns all that was read. Fails if the process ends before.
    pub(crate) fn wait_until_says(&mut self, line: &str) -> String {
        let mut said = String::new();
        loop {
            let start = said.len();
            let count = self.said.read_line(&mut said).expect("read");
            assert!(count > 0, "it has ended without saying `{line}`, but: {said}");
            if said[start..].trim_end() == line {
                return said;
            }
        }
    }

    /// Sends the line for which the process waits, so that it goes on.
    pub(crate) fn tell(&mut self) {
        let stdin = self.child.stdin.as_mut().expect("piped");
        stdin.write_all(b"go on\n").expect("it listens");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it is there");
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_some()
    }

    /// Waits for its end. The output has only the lines that were not read before.
    pub(crate) fn end(mut self) -> Ended {
        let mut said = String::new();
        let mut complaint = String::new();
        self.said.read_to_string(&mut said).expect("read");
        let mut stderr = self.child.stderr.take().expect("piped");
        stderr.read_to_string(&mut complaint).expect("read");
        let status = self.child.wait().expect("ended").to_string();
        Ended { pid: self.id(), status, said, complaint, after: self.started.elapsed() }
    }
}

impl Ended {
    /// Checks that it ended well and without an error, and returns its output.
    pub(crate) fn well(self) -> String {
        let found = (self.status.as_str(), self.complaint.as_str());
        assert_eq!(found, ("exit status: 0", ""), "{self:?}");
        self.said
    }

    /// Checks that it ended well with a warning on one line, which has this text, and returns its
    /// output.
    pub(crate) fn warned(self, text: &str) -> String {
        let line = self.complaint.strip_suffix('\n').filter(|line| !line.contains('\n'));
        let warning = line.and_then(|line| line.strip_prefix("hsdp: warning: "));
        assert_eq!(self.status, "exit status: 0", "{self:?}");
        assert!(warning.is_some_and(|warning| warning.contains(text)), "{self:?}");
        self.said
    }

    /// The one line of its error. Checks that the exit code is 2.
    pub(crate) fn badly(&self) -> &str {
        assert_eq!(self.status, "exit status: 2", "{self:?}");
        let line = self.complaint.strip_suffix('\n').unwrap_or_default();
        assert!(!line.is_empty() && !line.contains('\n'), "not one line: {self:?}");
        line
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until all of them print this line.
pub(crate) fn all_say(world: &mut [Process], line: &str) {
    for process in world {
        process.wait_until_says(line);
    }
}

/// The ends of all processes.
pub(crate) fn end(world: Vec<Process>) -> Vec<Ended> {
    world.into_iter().map(Process::end).collect()
}
