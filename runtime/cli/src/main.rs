//! The program `hsdp`.
//!
//! ```text
//! hsdp checkpoint ls run/checkpoints
//!     lists checkpoints; also verify, export, reshard, diff
//! hsdp plan Qwen3-8B/config.json --mesh 2x8
//!     computes memory and traffic of a step (PLAN.md)
//! hsdp simulate llama3-8b --mesh 2x8 --machine a100-node
//!     predicts the time of a step (SIMULATE.md)
//! hsdp search llama3-8b --ranks 64 --machine h100-cluster --batch-tokens 4194304
//!     searches for the fastest mesh and options (SIMULATE.md)
//! hsdp calibrate --steps steps.csv --out machine.toml
//!     fits numbers of a machine to measured times (SIMULATE.md)
//! hsdp doctor
//!     reports the libraries and programs of this machine
//! hsdp check schedules.json
//!     judges whether all operations of all ranks complete (CHECK.md)
//! hsdp trace run/flight
//!     explains the flight records of a failed world
//! hsdp launch -n 4 --restarts 2 -- ./train
//!     starts ranks as processes, and ends them together
//! hsdp completions bash
//!     prints the completion script of a shell
//! ```
//!
//! An error is one line on stderr. Exit codes: 0 on success; 1 if checkpoints are broken or differ,
//! or if operations of schedules do not complete; 2 if the arguments are invalid or the command
//! fails. `launch` ends with the exit code of the first rank that failed. If a signal killed that
//! rank, the code is 128 plus the signal's number. If a signal interrupts a job in which no rank
//! has failed, the code is 0 only if all ranks have ended.

mod calibrate;
mod check;
mod checkpoint;
mod completions;
mod doctor;
mod launch;
mod model;
mod mpirun;
mod output;
mod plan;
mod search;
mod simulate;
mod svg;
mod trace;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use hsdp_train::{Failure, Warnings, command_line};

/// Tools beside training: checkpoints, plans, flight records, and ranks as processes
#[derive(Debug, Parser)]
#[command(name = "hsdp", version)]
struct ProgramArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists, verifies, exports, reshards and compares checkpoints
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Computes the memory and the traffic of a model's training step on each rank, before anything
    /// runs
    Plan(plan::PlanArgs),
    /// Predicts the time of a model's training step on a machine, and where it goes
    Simulate(simulate::SimulateArgs),
    /// Searches for the fastest mesh and options of a model on a number of ranks of a machine
    Search(search::SearchArgs),
    /// Fits numbers of a machine to measured times of steps and all-reduces
    Calibrate(calibrate::CalibrateArgs),
    /// Judges whether all operations of schedules complete, without running them
    Check(check::CheckArgs),
    /// Explains why a world failed, from the flight records of its ranks
    Trace(trace::TraceArgs),
    /// Reports which libraries and programs this machine has, and how to install the missing ones
    Doctor(doctor::DoctorArgs),
    /// Starts the ranks of a job on this machine, and ends them together
    Launch(launch::LaunchArgs),
    /// Runs the command of one rank, for `hsdp launch`
    #[command(hide = true)]
    LaunchRank(launch::attendant::RankArgs),
    /// Becomes a command that dies with its parent, for `hsdp launch`
    #[command(hide = true)]
    LaunchExec(launch::job::ExecArgs),
    /// Prints the completion script of a shell
    Completions(completions::CompletionsArgs),
}

fn main() -> ExitCode {
    hsdp_train::program("hsdp", || {
        let options: ProgramArgs = command_line::read().map_err(Failure::input)?;
        Warnings::of("hsdp").listen().map_err(Failure::work)?;
        match options.command.run().map_err(Failure::input)? {
            CommandOutcome::Well => Ok(ExitCode::SUCCESS),
            CommandOutcome::Wrong => Ok(ExitCode::FAILURE),
            CommandOutcome::Ended(code) => Ok(ExitCode::from(code)),
        }
    })
}

impl Command {
    fn run(self) -> Result<CommandOutcome, Box<dyn Error>> {
        match self {
            Self::Checkpoint(command) => command.run(),
            Self::Plan(options) => plan::run(&options),
            Self::Simulate(options) => simulate::run(&options),
            Self::Search(options) => search::run(&options),
            Self::Calibrate(options) => calibrate::run(&options),
            Self::Check(options) => check::run(&options),
            Self::Trace(options) => trace::run(&options),
            Self::Doctor(options) => doctor::run(&options),
            Self::Completions(options) => completions::run(&options),
            Self::Launch(options) => launch::run(&options),
            Self::LaunchRank(options) => launch::attendant::run(&options),
            Self::LaunchExec(options) => launch::job::exec(&options),
        }
    }
}

/// Result of a command that could be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandOutcome {
    /// Success.
    Well,
    /// Checkpoints are broken or differ, or operations of schedules do not complete, and the output
    /// shows it.
    Wrong,
    /// The launched ranks have ended with this exit code.
    Ended(u8),
}
