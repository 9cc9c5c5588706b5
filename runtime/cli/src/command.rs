//! What a command of the system says.

use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// How long it may take to say it.
const PATIENCE: Duration = Duration::from_secs(5);

/// The most that is read of it.
const MOST: u64 = 4 << 20;

/// What it writes to stdout.
///
/// # Errors
/// In words, if it cannot be started, or does not end in time; then it is killed.
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
    // It ends when the program's stdout does: a program that is killed closes it.
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.map(|stdout| stdout.take(MOST).read_to_end(&mut bytes));
        let _ = said.send(read.map(|read| read.map(|_| bytes)));
    });
    let heard = heard.recv_timeout(PATIENCE);
    // What has said all that it has to say may still be there.
    let _ = child.kill();
    child.wait().map_err(failed)?;
    match heard {
        Ok(Some(bytes)) => Ok(String::from_utf8_lossy(&bytes.map_err(failed)?).into_owned()),
        _ => Err(format!("{} did not end within {PATIENCE:?}", program.display())),
    }
}
