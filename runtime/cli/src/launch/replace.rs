//! `hsdp launch-exec`: replaces itself with another program, which dies with its parent.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use clap::Args;

use crate::outcome::Outcome;

/// Options of `hsdp launch-exec`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Pid of the process that started this one
    #[arg(long)]
    parent: u32,

    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Exit codes of shells for a command that does not exist, and for one that cannot be run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

/// Replaces this process with the command. Setting the death signal in the child of a fork would
/// need unsafe code, so this program runs for a moment instead.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    die_with_parent()?;
    // A parent that died before this call sends no signal.
    if std::os::unix::process::parent_id() != options.parent {
        return Ok(Outcome::Ended(1));
    }
    let (program, arguments) = split(&options.command)?;
    let error = Command::new(program).args(arguments).exec();
    hsdp_train::tell("hsdp", format_args!("cannot start {}: {error}", program.display()));
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    Ok(Outcome::Ended(if is_missing { NOT_FOUND } else { NOT_RUN }))
}

/// Returns a command that replaces itself with `program`. It dies with the thread that starts it,
/// which must be the main thread.
pub(super) fn command(program: &Path, arguments: &[OsString]) -> io::Result<Command> {
    let parent = std::process::id().to_string();
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["launch-exec", "--parent", &parent, "--"]).arg(program).args(arguments);
    Ok(command)
}

/// Splits a command into the program and its arguments.
///
/// # Errors
/// A text, if the command is empty.
pub(super) fn split(command: &[OsString]) -> Result<(&OsStr, &[OsString]), String> {
    let (program, arguments) = command.split_first().ok_or("there is no command")?;
    Ok((program, arguments))
}

#[cfg(target_os = "linux")]
fn die_with_parent() -> io::Result<()> {
    use nix::sys::{prctl::set_pdeathsig, signal::Signal};

    Ok(set_pdeathsig(Signal::SIGKILL)?)
}

/// Does nothing, because other systems have no such signal: a process that is killed leaves its
/// children running.
#[cfg(not(target_os = "linux"))]
#[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
fn die_with_parent() -> io::Result<()> {
    Ok(())
}
