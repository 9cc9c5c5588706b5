//! A world of processes, of which the test is the launcher.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// Processes by rank. Those that are left are killed with it.
pub(crate) struct World {
    processes: Vec<(Child, BufReader<ChildStdout>)>,
    address: SocketAddr,
}

impl World {
    /// Starts all ranks, with changes of their environment; a variable without a value is not set.
    pub(crate) fn start(size: u32, part: &str, changes: &[(&str, &str)]) -> Self {
        // Free when it is asked for; another process could take it before rank 0 does.
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = free.local_addr().expect("an address");
        drop(free);
        let start = |rank: u32| {
            let mut command = Command::new(std::env::current_exe().expect("a path"));
            command
                .env("HSDP_TEST_PART", part)
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", size.to_string())
                .env("MASTER_ADDR", address.ip().to_string())
                .env("MASTER_PORT", address.port().to_string())
                .env("HSDP_JOB_SECRET", "5a".repeat(32))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            for (name, value) in changes {
                if value.is_empty() {
                    command.env_remove(name)
                } else {
                    command.env(name, value)
                };
            }
            let mut child = command.spawn().expect("a process");
            let said = BufReader::new(child.stdout.take().expect("piped"));
            (child, said)
        };
        Self { processes: (0..size).map(start).collect(), address }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(|(child, _)| child.id()).collect()
    }

    pub(crate) fn wait_until_all_say(&mut self, line: &str) {
        (0..self.processes.len()).for_each(|rank| self.wait_until_says(rank, line));
    }

    /// Reads until a line is this one; who ends before has not said it.
    pub(crate) fn wait_until_says(&mut self, rank: usize, line: &str) {
        let mut said = String::new();
        loop {
            let start = said.len();
            let count = self.processes[rank].1.read_line(&mut said).expect("read");
            assert!(count > 0, "rank {rank} has ended without saying `{line}`, but: {said}");
            if said[start..].trim_end() == line {
                return;
            }
        }
    }

    pub(crate) fn kill(&mut self, rank: usize) {
        self.processes[rank].0.kill().expect("killed");
    }

    pub(crate) fn stop(&self, rank: usize) {
        self.signal(rank, Signal::STOP);
    }

    pub(crate) fn go_on(&self, rank: usize) {
        self.signal(rank, Signal::CONT);
    }

    fn signal(&self, rank: usize, signal: Signal) {
        let pid = Pid::from_child(&self.processes[rank].0);
        kill_process(pid, signal).expect("it is there");
    }

    /// How each has ended, and what it has said there and to whom it failed.
    pub(crate) fn end(mut self) -> Vec<(String, String, String)> {
        let end = |(child, said): &mut (Child, BufReader<ChildStdout>)| {
            let (mut words, mut complaint) = (String::new(), String::new());
            said.read_to_string(&mut words).expect("read");
            let mut stderr = child.stderr.take().expect("piped");
            stderr.read_to_string(&mut complaint).expect("read");
            (child.wait().expect("ended").to_string(), words, complaint)
        };
        self.processes.iter_mut().map(end).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for (child, _) in &mut self.processes {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
