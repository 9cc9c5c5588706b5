//! Runs programs under test with limits on their time and memory.

use std::env;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Limits on a program's memory, in KiB, and on its time.
const KIBIBYTES: u64 = 4 << 20;
const SECONDS: u64 = 60;

/// Creates a command that limits a program's address space to 4 GiB, and kills it after 60 seconds.
pub fn bounded(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {KIBIBYTES} && exec timeout -s KILL {SECONDS} \"$0\" \"$@\"");
    command.arg("-c").arg(script).arg(program.as_ref()).stdin(Stdio::null());
    command
}

/// Runs a command with stdout on a full disk.
///
/// # Errors
/// The error of the system.
pub fn on_a_full_disk(command: &mut Command) -> io::Result<Output> {
    command.stdout(File::options().write(true).open("/dev/full")?).output()
}

/// Runs a command that must refuse its input, and returns its error, which is one line.
///
/// # Panics
/// If the command does not start, if its exit code is not 2, if it prints to stdout, or if its
/// error has more than one line.
#[must_use]
pub fn refusal(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{command:?}: {error}");
    assert_eq!(error.lines().count(), 1, "{command:?}: {error}");
    assert!(output.stdout.is_empty(), "{command:?}");
    error
}

/// Returns the path of an example, which cargo builds along with the tests of its crate.
///
/// # Panics
/// If it is not built.
#[must_use]
pub fn example(name: &str) -> PathBuf {
    let test = env::current_exe().expect("this test has a path");
    let folder = test.parent().and_then(Path::parent).expect("target/profile/deps");
    let program = folder.join("examples").join(format!("{name}{}", env::consts::EXE_SUFFIX));
    let advice =
        format!("{} is missing: `cargo build --example {name}` makes it", program.display());
    assert!(program.exists(), "{advice}");
    program
}
