//! Checks cores, memory, and whether processes may read each other's memory.

use std::fs;
use std::num::NonZeroUsize;
use std::thread;

use hsdp_sharding::ByteCount;

use super::{Finding, State};

/// Reports the cores that this process may use.
pub(super) fn cores() -> Finding {
    let said = match thread::available_parallelism().map(NonZeroUsize::get) {
        Ok(cores) => cores.to_string(),
        Err(error) => format!("unknown: {error}"),
    };
    Finding { said: Some(said), ..Finding::note("cores", "cores") }
}

/// Reports the machine's memory. A container's limit may be lower.
pub(super) fn memory() -> Finding {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let said = match ["MemTotal:", "MemAvailable:"].map(|field| kibibytes(&text, field)) {
        [Some(total), Some(free)] => format!("{total}, of which {free} are available"),
        _ => "unknown: /proc/meminfo has no MemTotal or MemAvailable".to_owned(),
    };
    Finding { said: Some(said), ..Finding::note("memory", "memory") }
}

/// Parses a line such as `MemTotal:       24604316 kB`.
fn kibibytes(text: &str, field: &str) -> Option<ByteCount> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let count: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    ByteCount(count).checked_mul(1024)
}

/// Reports whether a process may copy directly from another's memory. If it may, Open MPI does so
/// within a machine. Otherwise Open MPI copies twice.
#[cfg(target_os = "linux")]
pub(super) fn copies() -> Finding {
    let note = Finding::note("single_copy", "single copies between processes (CMA)");
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
    let said = match scope.as_deref().map(str::trim) {
        None => "ptrace is not limited: there is no yama/ptrace_scope".to_owned(),
        Some(scope) => format!("yama/ptrace_scope is {scope}"),
    };
    let is_open = matches!(scope.as_deref().map(str::trim), None | Some("0" | "1"));
    let (state, advice) = match (read_own(), is_open) {
        (Ok(()), true) => (State::Found, None),
        (Ok(()), false) => {
            (State::Missing, Some("set kernel.yama.ptrace_scope to 0 or 1".to_owned()))
        }
        (Err(errno), _) => {
            let advice = format!(
                "process_vm_readv: {errno}; give the container SYS_PTRACE, or have seccomp allow it"
            );
            (State::Missing, Some(advice))
        }
    };
    Finding { state, said: Some(said), advice, ..note }
}

/// Returns whether the system call exists and is permitted. A process may always read its own
/// memory, if it may read any process's.
#[cfg(target_os = "linux")]
fn read_own() -> Result<(), nix::Error> {
    use std::io::IoSliceMut;

    use nix::sys::uio::{RemoteIoVec, process_vm_readv};
    use nix::unistd::Pid;

    let (there, mut here) = ([7_u8], [0_u8]);
    let remote = RemoteIoVec { base: there.as_ptr() as usize, len: there.len() };
    process_vm_readv(Pid::this(), &mut [IoSliceMut::new(&mut here)], &[remote]).map(|_| ())
}

#[cfg(not(target_os = "linux"))]
pub(super) fn copies() -> Finding {
    let said = Some("unknown: this is not Linux".to_owned());
    Finding { said, ..Finding::note("single_copy", "single copies between processes (CMA)") }
}
