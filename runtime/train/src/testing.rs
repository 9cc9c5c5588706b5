//! Programs under test, with a limit on their time and memory.

use std::env;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The memory and the seconds that a program gets.
const KIBIBYTES: u64 = 4 << 20;
const SECONDS: u64 = 60;

/// A command that runs a program with 4 GiB of addresses and 60 seconds. A program that takes longer is killed.
pub fn bounded(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {KIBIBYTES} && exec timeout -s KILL {SECONDS} \"$0\" \"$@\"");
    command.arg("-c").arg(script).arg(program.as_ref()).stdin(Stdio::null());
    command
}

/// Runs a command whose stdout is on a full disk.
///
/// # Errors
/// The error of the system.
pub fn on_a_full_disk(command: &mut Command) -> io::Result<Output> {
    command.stdout(File::options().write(true).open("/dev/full")?).output()
}

/// The error of a command that has refused its input, which is one line.
///
/// # Panics
/// If the command does not start, has another exit code than 2, has printed to stdout, or has an error of more lines.
#[must_use]
pub fn refusal(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{command:?}: {error}");
    assert_eq!(error.lines().count(), 1, "{command:?}: {error}");
    assert!(output.stdout.is_empty(), "{command:?}");
    error
}

/// The path of an example, which cargo builds along with the tests of its crate.
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
