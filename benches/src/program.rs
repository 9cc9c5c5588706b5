//! A bench as a program: its command line and its exit code.

use std::process::ExitCode;

use clap::Parser;
use hsdp::Mesh;
use hsdp_program::{Failure, command_line};

/// The most ranks that are threads of a bench.
const MAX_THREADS: usize = 256;

/// Reads the command line, and calls `measure` with its options.
///
/// Prints one line and returns exit code 2 if the command line is invalid or more memory would be needed than there is, and exit
/// code 1 if the measurement fails or its result cannot be printed.
pub fn run<O: Parser>(measure: impl FnOnce(O) -> Result<(), Failure>) -> ExitCode {
    hsdp_program::run(O::command().get_name(), || {
        measure(command_line::read()?).map(|()| ExitCode::SUCCESS)
    })
}

/// Checks that a mesh has at most 256 ranks, which are threads of this process.
///
/// # Errors
/// [`Failure::Input`]
pub fn check_threads(mesh: Mesh) -> Result<(), Failure> {
    match mesh.world_size() {
        ..=MAX_THREADS => Ok(()),
        ranks => Err(Failure::Input(format!(
            "mesh {mesh} has {ranks} ranks: at most {MAX_THREADS} run as threads of one process"
        ))),
    }
}
