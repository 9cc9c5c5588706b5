//! Files that a user names: those that a program reads, and those that it writes.

mod inputs;
mod outputs;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Maximum time for one file on a slow machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns the result of `work`, which waits for nothing.
fn at_once<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    ended.recv_timeout(PATIENCE).expect("it waits for nothing")
}

/// Makes a FIFO, and returns its path.
fn fifo(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    assert!(Command::new("mkfifo").arg(&path).status().expect("it starts").success());
    path
}
