//! `hsdp launch`: runs the ranks of a job as processes of this machine.
//!
//! ```text
//! hsdp launch ---+--- mpirun ---+--- attendant of rank 0 --- command     --comm mpi
//!                |              +--- attendant of rank 1 --- command
//!                |
//!                +--- attendant of rank 0 --- command                    --comm nccl
//!                +--- attendant of rank 1 --- command
//! ```
//!
//! An attendant is this program again. It runs its rank's command in a process group of its own.
//! Over a socket it sends the output and the end of the command to the launcher, and receives the
//! signals for the group. When the launcher dies, the socket closes, and the attendant kills its
//! group. When the attendant dies, the system kills the command.
//!
//! In reading order: `attempt` (one start of all ranks), `supervisor` (the reaction to the end of a
//! rank, and to signals), `job` (the processes to start, and their environment), `ranks` (messages
//! from attendants, and the checks of an attendant that connects), `frame` (the messages and their
//! encoding), `attendant`, `terminal` (output and logs).
//!
//! The reader of the output may block. Then the lines of ranks wait, and so do the ranks. The
//! launcher does not wait: it learns of the end of each rank, and ends the job in time. It counts
//! the lines that have not been read by then, and reports their number.

mod attempt;
pub(crate) mod attendant;
mod frame;
pub(crate) mod job;
mod ranks;
mod supervisor;
mod terminal;

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, mpsc};
use std::thread::Builder;
use std::time::Duration;
use std::{fs, io, thread};

use clap::{Args, ValueEnum};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use self::attempt::LaunchAttempt;
use self::job::LaunchJob;
use self::ranks::{AttendantSocket, JobEvent, News};
use self::supervisor::Outlook;
use self::terminal::Terminal;
use crate::CommandOutcome;

/// Options of `hsdp launch`.
#[derive(Args, Debug)]
pub(crate) struct LaunchArgs {
    /// Number of ranks
    #[arg(short = 'n', long = "ranks", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,

    /// How ranks find each other
    #[arg(long, value_name = "COMM", default_value = "mpi")]
    comm: LaunchComm,

    /// How many times to start all ranks again after a failure
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    restarts: u32,

    /// Also write the output of each rank to DIR/attempt-K/rank-N.log
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,

    /// Seconds between SIGTERM and SIGKILL for the other ranks, when a rank has failed; then the
    /// most seconds for which the last lines wait for their reader
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    grace: u64,

    /// Command of a rank, with its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// The way in which ranks find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LaunchComm {
    /// Through MPI: mpirun starts them.
    Mpi,
    /// Through a control plane at rank 0, whose address is in their environment, as for NCCL.
    Nccl,
}

/// Exit code when a command or its attendant cannot be started, as for other errors of this
/// program.
const REFUSED: u8 = 2;

/// Starts the ranks, and starts them again after a failure as often as the options permit. Returns
/// the exit code of the last attempt.
pub(crate) fn run(options: &LaunchArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let job = LaunchJob::of(options)?;
    allow_files(options)?;
    let terminal = Arc::new(Terminal::new(options.logs.clone())?);
    let outcome = run_attempts(options, &job, &terminal).unwrap_or_else(|error| {
        // The reader of stderr may block, and only this writer has a bound.
        terminal.say(&error.to_string());
        CommandOutcome::Ended(REFUSED)
    });
    terminal.finish();
    Ok(outcome)
}

fn run_attempts(
    options: &LaunchArgs,
    job: &LaunchJob,
    terminal: &Arc<Terminal>,
) -> Result<CommandOutcome, Box<dyn Error>> {
    let (events, received) = mpsc::channel();
    let ranks = AttendantSocket::listen(&events, terminal)?;
    forward_signals(&events)?;
    let grace = Duration::from_secs(options.grace);
    let mut number = 0;
    let mut lost = 0;
    loop {
        terminal.begin(number, options.ranks, job.starter())?;
        ranks.begin(number, options.ranks);
        let attempt = LaunchAttempt { number, job, grace, terminal };
        let mut ended = attempt.run(&events, &received, &ranks)?;
        // Ranks whose output is lost in any attempt have not succeeded.
        lost += ended.lost;
        ended.lost = lost;
        let outlook = if number < options.restarts { Outlook::Again } else { Outlook::Last };
        if let Some(line) = ended.tell(number, outlook) {
            terminal.say(&line);
        }
        if ended.is_final() || outlook == Outlook::Last {
            return Ok(CommandOutcome::Ended(ended.code()));
        }
        number += 1;
    }
}

/// Number of open files beside those of the ranks: standard streams, the listening socket, pipes to
/// mpirun, and those that this process inherited.
const OTHER_FILES: u64 = 32;

/// Raises the soft limit of open files to the need of the ranks: a socket for each, and a log. The
/// ranks inherit it.
///
/// # Errors
/// A text with the numbers, if the hard limit is lower. Ranks beyond it could not connect.
fn allow_files(options: &LaunchArgs) -> Result<(), String> {
    let of_a_rank = if options.logs.is_some() { 2 } else { 1 };
    let needed = u64::from(options.ranks) * of_a_rank + OTHER_FILES;
    let failed = |error| format!("cannot set the limit of open files to {needed}: {error}");
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(failed)?;
    if needed <= soft {
        return Ok(());
    }
    if needed > hard {
        let ranks = options.ranks;
        return Err(format!(
            "{ranks} ranks need {needed} open files of this process, and its hard limit is {hard} (ulimit -Hn): raise it, or start fewer ranks"
        ));
    }
    setrlimit(Resource::RLIMIT_NOFILE, needed, hard).map_err(failed)
}

/// Signals that end a job.
const FORWARDED: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// Sends each of the signals as an event, instead of ending the process. A signal that this process
/// has ignored since its start, as under `nohup` or in the background of a script, stays ignored.
fn forward_signals(events: &Sender<News>) -> io::Result<()> {
    let ignored = ignored();
    let is_heeded = |signal: &i32| ignored & (1 << (signal - 1)) == 0;
    let mut signals = Signals::new(FORWARDED.into_iter().filter(is_heeded))?;
    let events = events.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            let _ = events.send(News { attempt: None, event: JobEvent::Signal(signal) });
        }
    })?;
    Ok(())
}

/// Returns the signals that this process ignores, one bit for each. Returns 0 if the system does
/// not report them.
fn ignored() -> u64 {
    fs::read_to_string("/proc/self/status").map_or(0, |status| mask(&status))
}

fn mask(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Starts a thread.
///
/// # Errors
/// The error of the system, which may have no thread or no memory left for one.
fn start_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let started = Builder::new().spawn(work);
    started
        .map(drop)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot start a thread: {error}")))
}

#[cfg(test)]
mod tests {
    use super::{SIGHUP, mask};

    #[test]
    fn the_mask_has_a_bit_for_each_ignored_signal() {
        let status = "Name:\thsdp\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert_eq!(mask(status), 1 << 12 | 1 << (SIGHUP - 1));
        assert_eq!(mask("Name:\thsdp\n"), 0);
    }
}
