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
//! rank, and to signals), `job` (the processes to start), `files` (the limit of open files),
//! `ranks` (messages from attendants), `frame` (their encoding), `claims` and `peer` (the checks of
//! an attendant that connects), `attendant`, `pipes`, `replace`, `terminal`, `writer`, `window` and
//! `lines` (output and logs), `threads`.
//!
//! The reader of the output may block. Then the lines of ranks wait, and so do the ranks. The
//! launcher does not wait: it learns of the end of each rank, and ends the job in time. It counts
//! the lines that have not been read by then, and reports their number.

mod attempt;
pub(crate) mod attendant;
mod claims;
mod end;
mod environment;
mod files;
mod frame;
mod job;
mod lines;
mod peer;
mod pipes;
mod ranks;
pub(crate) mod replace;
mod signals;
mod supervisor;
mod terminal;
mod threads;
mod window;
mod writer;

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use clap::{Args, ValueEnum};

use self::attempt::Attempt;
use self::job::Job;
use self::ranks::Ranks;
use self::supervisor::Outlook;
use self::terminal::Terminal;
use crate::outcome::Outcome;

/// Options of `hsdp launch`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Number of ranks
    #[arg(short = 'n', long = "ranks", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,

    /// How ranks find each other
    #[arg(long, value_name = "COMM", default_value = "mpi")]
    comm: Comm,

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
enum Comm {
    /// Through MPI: mpirun starts them.
    Mpi,
    /// Through a control plane at rank 0, whose address is in their environment, as for NCCL.
    Nccl,
}

/// Exit code when a process cannot be started, as for other errors of this program.
const REFUSED: u8 = 2;

impl Options {
    fn grace(&self) -> Duration {
        Duration::from_secs(self.grace)
    }
}

/// Starts the ranks, and starts them again after a failure as often as the options permit. Returns
/// the exit code of the last attempt.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let job = Job::of(options)?;
    files::allow(options)?;
    let terminal = Arc::new(Terminal::new(options.logs.clone())?);
    let outcome = run_attempts(options, &job, &terminal).unwrap_or_else(|error| {
        // The reader of stderr may block, and only this writer has a bound.
        terminal.say(&error.to_string());
        Outcome::Ended(REFUSED)
    });
    terminal.finish();
    Ok(outcome)
}

fn run_attempts(
    options: &Options,
    job: &Job,
    terminal: &Arc<Terminal>,
) -> Result<Outcome, Box<dyn Error>> {
    let (events, received) = mpsc::channel();
    let ranks = Ranks::listen(&events, terminal)?;
    signals::forward(&events)?;
    let (mut number, mut lost) = (0, 0);
    loop {
        terminal.begin(number, options.ranks, job.starter())?;
        ranks.begin(number, options.ranks);
        let attempt = Attempt { number, job, grace: options.grace(), terminal };
        let mut ended = attempt.run((&events, &received), &ranks)?;
        // Ranks whose output is lost in any attempt have not succeeded.
        lost += ended.lost;
        ended.lost = lost;
        let outlook = if number < options.restarts { Outlook::Again } else { Outlook::Last };
        if let Some(line) = ended.tell(number, outlook) {
            terminal.say(&line);
        }
        if ended.is_final() || outlook == Outlook::Last {
            return Ok(Outcome::Ended(ended.code()));
        }
        number += 1;
    }
}
