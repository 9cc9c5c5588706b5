//! The first messages of ranks that share no memory: settings, which they compare. `REMOTE.md`,
//! "Beginning".

use std::sync::OnceLock;
use std::time::Duration;
use std::{env, fmt, fs, process};

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::alive;
use crate::{Error, SetupError, WorldOptions};

/// The request of a process: a world of `size` ranks, made by all processes of its job. Ranks that
/// are threads are their job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) size: usize,
    pub(crate) processes: usize,
}

/// The identity of a rank, and the settings that all ranks must share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessHello {
    host: String,
    /// Which of the times that its machine was started it is: other machines have others.
    boot: String,
    pub(super) process: u32,
    /// When it was started; 0 where that is not known.
    pub(super) started: u64,
    version: String,
    /// A hash of the program; 0 where it cannot be read.
    program: u64,
    size: u32,
    deadline: Duration,
    /// 0x0102, as the machine writes it: elements travel as they lie.
    order: [u8; 2],
}

impl ProcessHello {
    pub(crate) fn of(size: usize, options: &WorldOptions) -> Self {
        Self {
            host: line("/proc/sys/kernel/hostname").unwrap_or_else(|| "an unknown host".to_owned()),
            boot: boot().to_owned(),
            process: process::id(),
            started: alive::started(process::id()).unwrap_or(0),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            program: program(),
            size: u32::try_from(size).unwrap_or(u32::MAX),
            deadline: options.deadline,
            order: 0x0102_u16.to_ne_bytes(),
        }
    }

    /// Whether it was said on this machine.
    pub(super) fn is_of_this_machine(&self) -> bool {
        !self.boot.is_empty() && self.boot == boot()
    }

    /// The settings that all ranks must share, with their names.
    fn settings(&self) -> [(&'static str, String); 5] {
        let Self { version, order, size, deadline, program, .. } = self;
        let program = format!("{program:016x}");
        [
            ("version", format!("{version:?}")),
            ("byte order", format!("{order:?}")),
            ("size of the world", format!("{size:?}")),
            ("deadline", format!("{deadline:?}")),
            ("program (its hash)", format!("{program:?}")),
        ]
    }
}

/// Whether all say the same: the same answer on all ranks.
///
/// # Errors
/// [`SetupError::ConfigMismatch`], of the first rank that differs from rank 0.
pub(crate) fn compare(hellos: &[ProcessHello]) -> Result<(), Error> {
    let Some((first, others)) = hellos.split_first() else { return Ok(()) };
    for (other, hello) in (1..).zip(others) {
        let mut settings = first.settings().into_iter().zip(hello.settings());
        if let Some(((what, expected), (_, found))) = settings.find(|(one, other)| one != other) {
            return Err(SetupError::ConfigMismatch {
                what,
                ranks: [Rank::new(0), Rank::new(other)],
                said: [format!("{expected} ({first})"), format!("{found} ({hello})")].into(),
            }
            .into());
        }
    }
    Ok(())
}

/// The error with the ranks that have come, and those that have not.
pub(super) fn incomplete(hellos: &[Option<ProcessHello>], deadline: Duration) -> Error {
    let ranks = |there| {
        let numbered = (0..).zip(hellos);
        numbered.filter(|(_, it)| it.is_some() == there).map(|(rank, _)| rank).collect()
    };
    SetupError::Incomplete { deadline, arrived: ranks(true), missing: ranks(false) }.into()
}

impl fmt::Display for ProcessHello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}", self.process, self.host)
    }
}

/// Different each time that a machine is started; empty where that is not known.
fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| line("/proc/sys/kernel/random/boot_id").unwrap_or_default())
}

/// The one line of a file of the system.
fn line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Once for each process: it may be large.
fn program() -> u64 {
    static PROGRAM: OnceLock<u64> = OnceLock::new();
    *PROGRAM.get_or_init(|| {
        let bytes = env::current_exe().and_then(fs::read);
        bytes.map_or(0, |bytes| xxh3_64(&bytes))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_differs_from_rank_0_is_named_with_both_sides() {
        let hello = ProcessHello::of(3, &WorldOptions::default());
        compare(&[hello.clone(), hello.clone()]).expect("they are the same");
        let other = |change: &dyn Fn(&mut ProcessHello)| {
            let mut other = ProcessHello { host: "b".to_owned(), process: 7, ..hello.clone() };
            change(&mut other);
            let first = ProcessHello { host: "a".to_owned(), process: 6, ..hello.clone() };
            compare(&[first.clone(), first, other]).map_err(|error| error.to_string())
        };
        other(&|_| ()).expect("hosts and processes may differ");
        let refused = |change| other(change).expect_err("they differ");
        assert_eq!(
            refused(&|it| it.size = 4),
            "ranks 0 and 2 differ in their size of the world: 3 (process 6 on a), 4 (process 7 on b)"
        );
        assert!(refused(&|it| it.version = "0".to_owned()).contains("in their version: \""));
        assert!(
            refused(&|it| it.program = !it.program).contains("in their program (its hash): \"")
        );
        assert!(refused(&|it| it.order = [9, 9]).contains("in their byte order: ["));
        assert!(refused(&|it| it.deadline = Duration::ZERO).contains("120s (process 6 on a), 0ns"));
    }
}
