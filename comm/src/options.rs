//! How a world of threads runs.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use crate::{Fault, SlowChannel};

/// Options of a local world.
///
/// ```
/// use std::time::Duration;
/// use hsdp_comm::WorldOptions;
///
/// let options = WorldOptions { deadline: Duration::from_secs(5), ..WorldOptions::default() };
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct WorldOptions {
    /// How long a rank waits for one operation before it ends the world, from the moment when it begins to wait, not
    /// from when it issued. Of any length; default 120 s.
    pub deadline: Duration,
    /// How long a rank waits for one operation before it warns, naming who is missing; again each time that so long has
    /// passed. Default 5 s; a warning that would not come before the deadline is not given.
    pub late: Duration,
    /// How long a rank waits for one operation before it looks whether ranks wait for each other, each in an operation
    /// that another of them misses, so that none can go on: that ends the world, as [`CollectiveMismatch`]. Default
    /// 200 ms.
    ///
    /// A rank that has issued from several threads is never said to be stuck. If a thread may issue for the very
    /// first time while its rank waits elsewhere, `Duration::MAX` leaves such circles to the deadline.
    ///
    /// [`CollectiveMismatch`]: crate::Error::CollectiveMismatch
    pub circle_grace: Duration,
    /// Threads that do the work of operations beside the ranks.
    pub workers: Workers,
    /// What lies between the ranks of a process. Default [`Between::Memory`], or [`Between::Letters`] where the environment has
    /// `HSDP_APART=1`.
    pub between: Between,
    /// How many operations each rank keeps in mind, for [`World::flight_record`](crate::World::flight_record): some 200
    /// bytes each, allocated with the world. Default 1024, at most 65,536; with 0 nothing is recorded.
    pub flight_entries: usize,
    /// Where each rank of a [`launch`](crate::launch) that ends early leaves its flight record, as `rank-<n>.json`; nowhere
    /// by default. The folder is made if it is not there. What cannot be written is a warning.
    pub flight_dir: Option<PathBuf>,
    /// What goes wrong on purpose, for tests. Each fires once.
    pub faults: Vec<Fault>,
    /// What takes longer on purpose, for tests and benches: at most one entry a channel counts, the first.
    pub slow: Vec<SlowChannel>,
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(120),
            late: Duration::from_secs(5),
            circle_grace: Duration::from_millis(200),
            workers: Workers::Auto,
            between: Between::default(),
            flight_entries: 1024,
            flight_dir: None,
            faults: Vec::new(),
            slow: Vec::new(),
        }
    }
}

/// What lies between the ranks of a process. Results do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// They read each other's memory.
    Memory,
    /// They share none, and hear of each other by letters alone, as ranks in processes of their own do: slower, and for programs
    /// and tests that are to be tried so.
    Letters,
}

/// What the environment says: with `HSDP_APART=1` letters, else memory.
impl Default for Between {
    fn default() -> Self {
        let apart = env::var_os("HSDP_APART").is_some_and(|value| value == "1");
        if apart { Self::Letters } else { Self::Memory }
    }
}

/// How many threads do the work of operations beside the ranks. Results do not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// One a core, but no more than there are ranks.
    #[default]
    Auto,
    /// So many. With 0 the member that arrives last does all the work before its call returns.
    Count(usize),
}
