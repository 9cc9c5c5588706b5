//! `hsdp launch-exec`: becomes another program, which dies with its parent.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use clap::Args;

use crate::outcome::Outcome;

/// What to become.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The process that started this one
    #[arg(long)]
    parent: u32,

    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// What shells say of a command that is not there, and of one that cannot be run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

/// Becomes it. It cannot be asked for in the child of a fork without unsafe code, so this program is there for a moment.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    die_with_parent()?;
    // A parent that was gone before that was asked for sends no signal.
    if std::os::unix::process::parent_id() != options.parent {
        return Ok(Outcome::Ended(1));
    }
    let (program, arguments) = split(&options.command)?;
    let error = Command::new(program).args(arguments).exec();
    crate::outcome::refuse(&format!("cannot start {}: {error}", program.display()));
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    Ok(Outcome::Ended(if is_missing { NOT_FOUND } else { NOT_RUN }))
}

/// The process that becomes this command; it dies with the thread that starts it, which must be the main one.
pub(super) fn command(program: &Path, arguments: &[OsString]) -> io::Result<Command> {
    let parent = std::process::id().to_string();
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["launch-exec", "--parent", &parent, "--"]).arg(program).args(arguments);
    Ok(command)
}

/// The program and its arguments.
///
/// # Errors
/// In words, if there is none.
pub(super) fn split(command: &[OsString]) -> Result<(&OsStr, &[OsString]), String> {
    let (program, arguments) = command.split_first().ok_or("there is no command")?;
    Ok((program, arguments))
}

#[cfg(target_os = "linux")]
fn die_with_parent() -> io::Result<()> {
    use nix::sys::{prctl::set_pdeathsig, signal::Signal};

    Ok(set_pdeathsig(Signal::SIGKILL)?)
}

/// Elsewhere there is no such signal: who is killed leaves its children.
#[cfg(not(target_os = "linux"))]
#[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
fn die_with_parent() -> io::Result<()> {
    Ok(())
}
