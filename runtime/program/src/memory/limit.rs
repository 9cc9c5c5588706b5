//! The memory that this process may have.

/// The most memory that this process may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Its bytes.
    pub bytes: u64,
    /// Its origin, in words that end before the number, such as "this machine has".
    pub reason: &'static str,
}

/// The addresses that a process has on the processors of today: 2^47.
const ADDRESSES: Limit = Limit { bytes: 1 << 47, reason: "a process has addresses for" };

impl Limit {
    /// The least of the machine's memory, the limit of the control group, and the limit on the address space (`ulimit -v`).
    ///
    /// It does not depend on the memory that other processes take at the moment.
    #[must_use]
    pub fn of_process() -> Self {
        let known = [machine(), control_group(), address_space()].into_iter().flatten();
        known.fold(ADDRESSES, |least, next| if next.bytes < least.bytes { next } else { least })
    }
}

#[cfg(target_os = "linux")]
fn machine() -> Option<Limit> {
    let info = rustix::system::sysinfo();
    // A word, and its unit: not every machine counts to 64 bits.
    let bytes = u128::from(info.totalram) * u128::from(info.mem_unit.max(1));
    Some(Limit { bytes: u64::try_from(bytes).unwrap_or(u64::MAX), reason: "this machine has" })
}

#[cfg(not(target_os = "linux"))]
fn machine() -> Option<Limit> {
    None
}

#[cfg(unix)]
fn address_space() -> Option<Limit> {
    use rustix::process::{Resource, getrlimit};

    let bytes = getrlimit(Resource::As).current?;
    Some(Limit { bytes, reason: "this process may have (ulimit -v)" })
}

#[cfg(not(unix))]
fn address_space() -> Option<Limit> {
    None
}

/// The least limit of the control group of this process and of the groups around it. A container has its own group, and so has a
/// step of a job of Slurm.
fn control_group() -> Option<Limit> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let bytes = groups.lines().filter_map(of_group).min()?;
    Some(Limit { bytes, reason: "the control group of this process may have" })
}

/// The least limit of a line such as `0::/job_7/step_0` (version 2) or `4:memory:/job_7` (version 1), and of the groups around.
fn of_group(line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, group) = (fields.next()?, fields.next()?);
    let (root, file) = match controllers {
        "" => ("/sys/fs/cgroup", "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let folders = std::path::Path::new(group.trim_start_matches('/')).ancestors();
    let limit = |folder| {
        let path = std::path::Path::new(root).join(folder).join(file);
        std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()
    };
    folders.filter_map(limit).min()
}
