//! Environment variables that configure candle's threads and the allocator.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::process::Command;
use std::thread;

use hsdp::Launched;

use crate::failure::Failure;
use crate::options::{Comm, RunOptions};

/// Name of the variable with the number of compute threads, which candle, its matmul and rayon
/// read.
const THREADS: &str = "RAYON_NUM_THREADS";

/// Name of the variable with the time in milliseconds after which mimalloc returns freed memory to
/// the system. -1 means never.
const PURGE_DELAY: &str = "MIMALLOC_PURGE_DELAY";

/// Returns the number of ranks that share the cores of this process. It is 1 if the launcher has
/// bound this process to some of the cores. Otherwise it is the number of ranks on this machine, or
/// all ranks if the launcher does not set that number.
pub(crate) fn sharing(options: &RunOptions) -> Result<usize, Failure> {
    let ranks = options.mesh.world_size();
    if options.comm == Comm::Threads {
        return Ok(ranks);
    }
    let launched = Launched::from_env().map_err(Failure::input)?;
    let here = launched.and_then(|launched| launched.size_here).filter(|here| *here > 0);
    Ok(if is_bound() { 1 } else { here.unwrap_or(ranks) })
}

/// Returns whether this process may use only some of the machine's cores. `false` if the system
/// does not list them.
fn is_bound() -> bool {
    let read = |file| fs::read_to_string(file).ok();
    let status = read("/proc/self/status");
    let allowed = status.as_deref().and_then(|text| {
        let mut lines = text.lines();
        lines.find_map(|line| cores(line.strip_prefix("Cpus_allowed_list:")?))
    });
    let online = read("/sys/devices/system/cpu/online").and_then(|text| cores(&text));
    allowed.zip(online).is_some_and(|(allowed, online)| !online.is_subset(&allowed))
}

/// Parses a list of cores, such as `0-3,8`.
fn cores(list: &str) -> Option<BTreeSet<usize>> {
    let mut cores = BTreeSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cores.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cores)
}

/// Sets the variables that the user has not set, for `ranks` ranks that share the cores of this
/// process.
///
/// - A rank computes on its share of the cores. candle's default is all cores for each op, so the
///   ranks of this process would compete for them: four ranks on two cores would take almost twice
///   as long.
/// - Freed memory is kept. Each op frees and allocates tensors of the same sizes, and the system
///   has to zero memory before it provides it again.
///
/// The allocator reads its variable when a process starts, and a process with threads cannot safely
/// change its environment. So the program restarts itself.
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

/// Replaces this process. Returns only on failure.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_read() {
        assert_eq!(cores(" 0-3,8\n"), Some(BTreeSet::from([0, 1, 2, 3, 8])));
        assert_eq!(cores("5"), Some(BTreeSet::from([5])));
        assert_eq!([cores(""), cores("0-x")], [None, None]);
    }

    /// Variable with which this test restarts itself in a process of its own.
    const OWN: &str = "HSDP_TEST_OF_CORES";

    #[test]
    fn the_processes_of_one_machine_share_its_cores() {
        let mesh = "4x2".parse().expect("a mesh");
        let threads = RunOptions { mesh, ..RunOptions::default() };
        let processes = RunOptions { comm: Comm::Mpi, ..threads.clone() };
        if env::var_os(OWN).is_some() {
            let [threads, processes] =
                [threads, processes].map(|it| sharing(&it).expect("a number"));
            println!("{threads} threads, {processes} processes");
            return;
        }
        let shared = |local: &[(&str, &str)]| {
            let mut own = Command::new(env::current_exe().expect("a path"));
            own.args(["--nocapture", "the_processes_of_one_machine"]).env_clear().env(OWN, "1");
            own.env("OMPI_COMM_WORLD_RANK", "3").env("OMPI_COMM_WORLD_SIZE", "8");
            let ended = own.envs(local.iter().copied()).output().expect("it starts");
            String::from_utf8_lossy(&ended.stdout).into_owned()
        };
        let unless_bound = |ranks: usize| if is_bound() { 1 } else { ranks };
        for (local, here) in [(&[][..], 8), (&[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")], 2)] {
            let expected = format!("8 threads, {} processes", unless_bound(here));
            let printed = shared(local);
            assert!(printed.contains(&expected), "{printed}");
        }
    }
}
