//! Limit of the files that a launcher has open.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::Options;

/// Number of open files beside those of the ranks: standard streams, the listening socket, pipes to
/// mpirun, and those that this process inherited.
const OTHERS: u64 = 32;

/// Raises the soft limit of open files to the need of the ranks: a socket for each, and a log. The
/// ranks inherit it.
///
/// # Errors
/// A text with the numbers, if the hard limit is lower. Ranks beyond it could not connect.
pub(super) fn allow(options: &Options) -> Result<(), String> {
    let of_a_rank = if options.logs.is_some() { 2 } else { 1 };
    let needed = u64::from(options.ranks) * of_a_rank + OTHERS;
    let failed = |error| format!("cannot set the limit of open files to {needed}: {error}");
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(failed)?;
    if needed <= soft {
        return Ok(());
    }
    if needed > hard {
        let ranks = options.ranks;
        return Err(format!(
            "{ranks} ranks need {needed} open files of this process, and its hard limit is {hard} (ulimit -Hn): raise it, or start fewer ranks"
        ));
    }
    setrlimit(Resource::RLIMIT_NOFILE, needed, hard).map_err(failed)
}
