//! The program `hsdp`.
//!
//! ```text
//! hsdp checkpoint ls run/checkpoints                       what is there; verify, export, reshard, diff
//! hsdp plan llama3-8b --mesh 2x8 --param-dtype bf16        what a step would hold and move (PLAN.md)
//! hsdp doctor                                              which libraries and programs are found
//! hsdp trace run/flight                                    what the records of a world that failed say
//! hsdp launch -n 4 --restarts 2 -- ./train                 ranks as processes, ended together
//! hsdp completions bash                                    for a shell
//! ```
//!
//! What it cannot do is one line on stderr. Exit codes: 0; 1 where checkpoints are broken or differ; 2 where it was asked for what makes no
//! sense, or cannot do it. `launch` ends with the code of the first rank that ended badly, which is 128 and the signal of one that was killed.

mod checkpoint;
mod command;
mod completions;
mod doctor;
#[cfg(unix)]
mod launch;
mod mpirun;
mod outcome;
mod plan;
mod trace;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use outcome::Outcome;

/// What hsdp has beside training: checkpoints, plans, flight records, and ranks as processes
#[derive(Debug, Parser)]
#[command(name = "hsdp", version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists, verifies, exports, reshards and compares checkpoints
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Says what a step of a model would hold and move on each rank, before anything runs
    Plan(plan::Options),
    /// Says what the flight records of a world that failed tell together
    Trace(trace::Options),
    /// Says which libraries and programs are found, and what to install for those that are missing
    Doctor(doctor::Options),
    /// Starts the ranks of a job on this machine, and ends them together
    #[cfg(unix)]
    Launch(launch::Options),
    /// Has the command of one rank, for `hsdp launch`
    #[cfg(unix)]
    #[command(hide = true)]
    LaunchRank(launch::attendant::Options),
    /// Becomes a command that dies with its parent, for `hsdp launch`
    #[cfg(unix)]
    #[command(hide = true)]
    LaunchExec(launch::replace::Options),
    /// Prints what a shell needs to complete commands
    Completions(completions::Options),
}

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        // Help, and the version.
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => return outcome::refuse(&in_one_line(&error.to_string())),
    };
    match options.command.run() {
        Ok(Outcome::Well) => ExitCode::SUCCESS,
        Ok(Outcome::Wrong) => ExitCode::FAILURE,
        #[cfg(unix)]
        Ok(Outcome::Ended(code)) => ExitCode::from(code),
        Err(error) => outcome::refuse(&error.to_string()),
    }
}

impl Command {
    fn run(self) -> Result<Outcome, Box<dyn Error>> {
        match self {
            Self::Checkpoint(command) => command.run(),
            Self::Plan(options) => plan::run(&options),
            Self::Trace(options) => trace::run(&options),
            Self::Doctor(options) => doctor::run(&options),
            Self::Completions(options) => completions::run(&options),
            #[cfg(unix)]
            Self::Launch(options) => launch::run(&options),
            #[cfg(unix)]
            Self::LaunchRank(options) => launch::attendant::run(&options),
            #[cfg(unix)]
            Self::LaunchExec(options) => launch::replace::run(&options),
        }
    }
}

/// What comes before the first empty line says it all; what follows is advice and usage.
fn in_one_line(text: &str) -> String {
    let said = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    let line = said.collect::<Vec<_>>().join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}
