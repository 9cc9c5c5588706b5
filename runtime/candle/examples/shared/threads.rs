//! The number of threads that a rank computes with.

use std::env;
use std::io;
use std::num::NonZeroUsize;
use std::process::Command;
use std::thread;

/// The variable that candle and its matmul read, at every call.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Divides the cores among `ranks`, unless the user has set the variable.
///
/// By default candle uses all cores for each op, and the ranks of this process would compete for
/// them: four ranks on two cores take three times as long. A process with threads cannot safely
/// change its environment, so the program starts itself again with the variable set.
pub(crate) fn divide_cores(ranks: usize) -> io::Result<()> {
    if env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut again = Command::new(env::current_exe()?);
    again.args(env::args_os().skip(1)).env(VARIABLE, (cores / ranks).max(1).to_string());
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
