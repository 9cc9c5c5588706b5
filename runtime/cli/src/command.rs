//! Runs other programs for their output.

use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Time in which a program must write its output and close stdout. The first start from a network
/// disk is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum number of bytes that are read from stdout.
const MOST: u64 = 4 << 20;

/// Runs a program, and returns the text that it writes to stdout.
///
/// # Errors
/// A text, if the program cannot be started or does not end in time. In the latter case it is
/// killed.
pub(crate) fn output(program: &Path, arguments: &[&str]) -> Result<String, String> {
    let failed = |error: io::Error| format!("{}: {error}", program.display());
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    let stdout = child.stdout.take();
    let (said, heard) = mpsc::channel();
    // The thread ends when the program closes stdout, which a killed program also does.
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.map(|stdout| stdout.take(MOST).read_to_end(&mut bytes));
        let _ = said.send(read.map(|read| read.map(|_| bytes)));
    });
    let heard = heard.recv_timeout(PATIENCE);
    // A program that has closed stdout may still be running.
    let _ = child.kill();
    child.wait().map_err(failed)?;
    match heard {
        Ok(Some(bytes)) => Ok(String::from_utf8_lossy(&bytes.map_err(failed)?).into_owned()),
        _ => Err(format!("{} did not end within {PATIENCE:?}", program.display())),
    }
}
