//! `hsdp launch`: the ranks of a job as processes of this machine.
//!
//! ```text
//! hsdp launch ---+--- mpirun ---+--- attendant of rank 0 --- command     --comm mpi
//!                |              +--- attendant of rank 1 --- command
//!                |
//!                +--- attendant of rank 0 --- command                    --comm nccl
//!                +--- attendant of rank 1 --- command
//! ```
//!
//! An attendant is this program again. It has its rank's command in a process group of its own, sends what the command writes and how it ends to
//! the launcher over a socket, and passes on what signals the launcher asks for. Where the launcher is gone, so is the socket, and the
//! attendant kills its group; where the attendant is gone, the system kills the command.
//!
//! In reading order: `attempt` (one start of all ranks), `supervisor` (what is done when a rank ends, or a signal comes), `job` (what is started),
//! `ranks` (what attendants say), `frame` (how), `attendant`, `replace`, `terminal` and `lines` (what is shown and kept).

mod attempt;
pub(crate) mod attendant;
mod end;
mod environment;
mod frame;
mod job;
mod lines;
mod ranks;
pub(crate) mod replace;
mod signals;
mod supervisor;
mod terminal;

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use clap::{Args, ValueEnum};

use self::attempt::{Attempt, Outlook};
use self::job::Job;
use self::ranks::Ranks;
use self::terminal::Terminal;
use crate::outcome::Outcome;

/// What to start, and how.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// How many ranks
    #[arg(short = 'n', long = "ranks", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,

    /// How ranks find each other
    #[arg(long, value_name = "COMM", default_value = "mpi")]
    comm: Comm,

    /// How often the command is started again after it has failed
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    restarts: u32,

    /// Keep what each rank writes in DIR/attempt-K/rank-N.log
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,

    /// Seconds between SIGTERM and SIGKILL for the others, when a rank has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    grace: u64,

    /// The command of a rank, with its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// How ranks find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Comm {
    /// By MPI: mpirun starts them.
    Mpi,
    /// By a store of rank 0, whose address is in their environment, as for NCCL.
    Nccl,
}

impl Options {
    fn grace(&self) -> Duration {
        Duration::from_secs(self.grace)
    }
}

/// Starts the ranks, again if they fail and that was asked for; the exit code is theirs.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let job = Job::of(options)?;
    let (events, received) = mpsc::channel();
    let terminal = Arc::new(Terminal::new(options.logs.clone()));
    let ranks = Ranks::listen(&events, &terminal)?;
    signals::forward(&events)?;
    let mut number = 0;
    loop {
        terminal.begin(number, options.ranks, job.starter())?;
        let attempt = Attempt { number, job: &job, grace: options.grace(), terminal: &terminal };
        let ended = attempt.run((&events, &received), &ranks)?;
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
