//! Compares the memory that a program will need with its limit, before the program allocates it.

use std::fs;
use std::path::Path;

use hsdp::ByteCount;

/// Memory that a program will need, in parts. A sum beyond `u64::MAX` counts as `u64::MAX`.
#[derive(Clone, Debug, Default)]
pub struct Need {
    parts: Vec<(String, u64)>,
}

/// A program would need more memory than its process may have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "about {} of memory are needed, {} of them for {part}; {reason} {}",
    ByteCount(*.needed), ByteCount(*.of_part), ByteCount(*.limit)
)]
pub struct TooMuch {
    /// Bytes needed in total.
    pub needed: u64,
    /// Name of the part that needs the most.
    pub part: String,
    /// Bytes needed for that part.
    pub of_part: u64,
    /// Bytes that the process may have.
    pub limit: u64,
    /// Origin of the limit, as words that precede the number.
    pub reason: &'static str,
}

impl Need {
    /// Adds a part.
    #[must_use]
    pub fn with(mut self, part: impl Into<String>, bytes: u64) -> Self {
        self.parts.push((part.into(), bytes));
        self
    }

    /// Returns the sum of all parts.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Compares the sum with a limit.
    ///
    /// # Errors
    /// [`TooMuch`], which names the largest part.
    pub fn check(&self, limit: Limit) -> Result<(), TooMuch> {
        let needed = self.bytes();
        match self.parts.iter().max_by_key(|(_, bytes)| bytes) {
            Some((part, bytes)) if needed > limit.bytes => {
                let Limit { bytes: limit, reason } = limit;
                Err(TooMuch { needed, part: part.clone(), of_part: *bytes, limit, reason })
            }
            _ => Ok(()),
        }
    }
}

/// Multiplies sizes. Returns `u64::MAX` on overflow.
#[must_use]
pub fn product(sizes: &[usize]) -> u64 {
    sizes.iter().fold(1, |product, size| product.saturating_mul(*size as u64))
}

/// Maximum memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Number of bytes.
    pub bytes: u64,
    /// Origin of the limit, as words that precede the number, such as "this machine has".
    pub reason: &'static str,
}

/// Size of a process's address space on current processors, 2^47 bytes.
const ADDRESSES: Limit = Limit { bytes: 1 << 47, reason: "a process has addresses for" };

/// Root folder of control groups.
const GROUPS: &str = "/sys/fs/cgroup";

impl Limit {
    /// Returns the smallest of the machine's memory, the limit of the control group, and the limit
    /// on the address space (`ulimit -v`).
    ///
    /// Memory that other processes use at the moment is not subtracted.
    #[must_use]
    pub fn of_process() -> Self {
        let known = [machine(), control_group(), address_space()].into_iter().flatten();
        known.fold(ADDRESSES, |least, next| if next.bytes < least.bytes { next } else { least })
    }
}

#[cfg(target_os = "linux")]
fn machine() -> Option<Limit> {
    let info = rustix::system::sysinfo();
    // `totalram` counts in `mem_unit`s: on some machines a word is too small for the bytes.
    let bytes = u128::from(info.totalram) * u128::from(info.mem_unit.max(1));
    Some(Limit { bytes: u64::try_from(bytes).unwrap_or(u64::MAX), reason: "this machine has" })
}

#[cfg(not(target_os = "linux"))]
fn machine() -> Option<Limit> {
    None
}

fn address_space() -> Option<Limit> {
    use rustix::process::{Resource, getrlimit};

    let bytes = getrlimit(Resource::As).current?;
    Some(Limit { bytes, reason: "this process may have (ulimit -v)" })
}

/// Returns the smallest limit of this process's control group and of all groups that contain it.
/// Containers and the steps of Slurm jobs have their own groups.
fn control_group() -> Option<Limit> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let bytes = groups.lines().filter_map(|line| of_group(line, Path::new(GROUPS))).min()?;
    Some(Limit { bytes, reason: "the control group of this process may have" })
}

/// Returns the smallest limit of the group in a line such as `0::/job_7/step_0` (version 2) or
/// `4:memory:/job_7` (version 1), and of all groups that contain it.
fn of_group(line: &str, groups: &Path) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let controllers = fields.next()?;
    let group = fields.next()?;
    let (root, file) = match controllers {
        "" => (groups.to_owned(), "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            (groups.join("memory"), "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let around = Path::new(group.trim_start_matches('/')).ancestors();
    let limit = |group| {
        let text = fs::read_to_string(root.join(group).join(file)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    around.filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Limit = Limit { bytes: 1 << 30, reason: "this machine has" };

    #[test]
    fn the_largest_part_is_named() {
        let need = Need::default().with("a table", 1 << 31).with("a row", 1 << 11);
        let said = need.check(SMALL).expect_err("2 GiB").to_string();
        let expected = "about 2.00 GiB of memory are needed, 2.00 GiB of them for a table; \
                        this machine has 1.00 GiB";
        assert_eq!(said, expected);
        assert_eq!(Need::default().with("a row", 1 << 30).check(SMALL), Ok(()));
    }

    #[test]
    fn nothing_wraps_around() {
        let most = usize::MAX;
        assert_eq!([product(&[most, most, most]), product(&[0, most])], [u64::MAX, 0]);
        let need = Need::default().with("a cube", u64::MAX).with("a row", 1);
        assert_eq!(need.bytes(), u64::MAX);
        assert!(need.check(SMALL).is_err());
    }

    #[test]
    fn a_process_may_have_some_memory() {
        assert!(Limit::of_process().bytes > 1 << 20);
    }

    #[test]
    fn the_least_limit_of_the_groups_around_counts() {
        let groups = tempfile::tempdir().expect("a folder");
        let write = |folder: &str, file: &str, limit: &str| {
            let folder = groups.path().join(folder);
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join(file), limit).expect("written");
        };
        write("job/step", "memory.max", "max\n");
        write("job", "memory.max", "4096\n");
        write("", "memory.max", "8192\n");
        write("memory/job", "memory.limit_in_bytes", "1024\n");
        for (line, limit) in [
            ("0::/job/step", Some(4096)),
            ("0::/other", Some(8192)),
            ("4:cpu,memory:/job", Some(1024)),
            ("4:cpu:/job", None),
            ("nonsense", None),
        ] {
            assert_eq!(of_group(line, groups.path()), limit, "{line}");
        }
    }
}
