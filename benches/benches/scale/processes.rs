//! Ranks that are processes of their own, which find each other by the control plane.

use std::env;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use hsdp_train::Failure;

use crate::options::{Options, Subject};
use crate::report::{Point, Report};

/// Measures operations by NCCL and exchanges by the control plane.
pub(crate) fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    for ranks in &options.ranks {
        report.nccl.push(point(Subject::Operations, *ranks, options)?);
    }
    for members in &options.members {
        report.exchanges.push(point(Subject::Exchanges, *members, options)?);
    }
    Ok(())
}

/// The time that rank 0 of so many processes has measured.
fn point(subject: Subject, ranks: usize, options: &Options) -> Result<Point, Failure> {
    // Where the ranks of the emulated NCCL meet.
    let folder = tempfile::tempdir().map_err(Failure::work)?;
    let port = free_port().map_err(Failure::work)?;
    let start = |rank: usize| {
        let mut command = Command::new(env::current_exe()?);
        command
            .args(options.of_rank(subject))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("HSDP_JOB_SECRET", "5c".repeat(32))
            .env("HSDP_EMULATED_NCCL_FOLDER", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command.spawn()
    };
    let started: Result<Vec<_>, _> = (0..ranks).map(|rank| start(rank).map(Process)).collect();
    let ended: Result<Vec<_>, _> =
        started.map_err(Failure::work)?.into_iter().map(Process::end).collect();
    let said = ended?.swap_remove(0);
    let seconds = said.trim().parse();
    let seconds =
        seconds.map_err(|error| Failure::Work(format!("rank 0 has printed {said:?}: {error}")))?;
    Ok(Point { ranks, seconds })
}

fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A process that does not outlive this one's interest in it.
struct Process(Child);

impl Process {
    /// Waits for the end; returns what it has printed.
    fn end(mut self) -> Result<String, Failure> {
        let mut said = String::new();
        if let Some(mut out) = self.0.stdout.take() {
            std::io::Read::read_to_string(&mut out, &mut said).map_err(Failure::work)?;
        }
        let status = self.0.wait().map_err(Failure::work)?;
        if status.success() {
            return Ok(said);
        }
        Err(Failure::Work(format!("a rank has ended with {status}")))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended cannot be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
