//! The variables by which candle's threads and the allocator are set.

use std::env;
use std::io;
use std::num::NonZeroUsize;
use std::process::Command;
use std::thread;

/// The number of threads that compute: candle, its matmul and rayon read it.
const THREADS: &str = "RAYON_NUM_THREADS";

/// The time after which mimalloc gives freed memory back to the system, in milliseconds; -1 is never.
const PURGE_DELAY: &str = "MIMALLOC_PURGE_DELAY";

/// Sets the variables that the user has not set, for a job whose `ranks` share this machine.
///
/// - A rank computes with its part of the cores. By default candle uses all cores for each op, and the ranks of this process would
///   compete for them: four ranks on two cores would take almost twice as long.
/// - Freed memory is kept. Each op frees and allocates tensors of the same sizes, and memory of the system has to be zeroed first.
///
/// The allocator reads its variable when a process starts, and a process with threads cannot safely change its environment. So the program
/// starts itself again.
pub(crate) fn set(ranks: usize) -> io::Result<()> {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = (cores / ranks).max(1).to_string();
    let wanted = [(THREADS, threads.as_str()), (PURGE_DELAY, "-1")];
    let missing: Vec<_> =
        wanted.into_iter().filter(|(name, _)| env::var_os(name).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut again = Command::new(env::current_exe()?);
    again.args(env::args_os().skip(1)).envs(missing);
    Err(replace_process(again))
}

/// Returns only if it fails.
#[cfg(unix)]
fn replace_process(mut command: Command) -> io::Error {
    std::os::unix::process::CommandExt::exec(&mut command)
}

#[cfg(not(unix))]
fn replace_process(mut command: Command) -> io::Error {
    match command.status() {
        Ok(status) => std::process::exit(status.code().unwrap_or(1)),
        Err(error) => error,
    }
}
