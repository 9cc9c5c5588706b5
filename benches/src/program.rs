//! A bench as a program: its command line and its exit code.

use std::process::ExitCode;

use clap::Parser;
use hsdp::Mesh;
use hsdp_train::{Failure, Warnings, command_line, threads};

/// Maximum number of ranks in a bench: the largest mesh of `overhead`, whose models are small.
const MOST_RANKS: usize = 256;

/// Reads the command line, and calls `measure` with its options. Warnings of the libraries are
/// lines on stderr.
///
/// Prints one line and returns exit code 2 if the command line is invalid or more memory would be
/// needed than there is, and exit code 1 if the measurement fails or its result cannot be printed.
pub fn run<O: Parser>(measure: impl FnOnce(O) -> Result<(), Failure>) -> ExitCode {
    let command = O::command();
    let name = command.get_name();
    hsdp_train::program(name, || {
        let options = command_line::read()?;
        Warnings::of(name).listen().map_err(Failure::work)?;
        measure(options).map(|()| ExitCode::SUCCESS)
    })
}

/// Checks that a mesh has at most 256 ranks, which are threads of this process.
///
/// # Errors
/// [`Failure::Input`]
pub fn check_threads(mesh: Mesh) -> Result<(), Failure> {
    threads::check(mesh.world_size(), MOST_RANKS)
        .map_err(|problem| Failure::Input(format!("mesh {mesh} has {problem}")))
}
