//! Which job this is, and what its ranks agree on.

use std::fmt;
use std::net::SocketAddr;

use hsdp_sharding::Rank;

use crate::ControlError;
use crate::limits::{MOST_RANKS, MOST_STRING, cut};

/// Which job a process belongs to: a name, and a number that is another one at each start of the job.
///
/// It is no secret. A coordinator that an earlier start has left behind is told apart by the number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    name: Box<str>,
    start: u64,
}

impl Job {
    /// A job with this name, at this start.
    ///
    /// # Errors
    /// [`ControlError::TooLong`] if the name has more than 256 bytes.
    pub fn new(name: &str, start: u64) -> Result<Self, ControlError> {
        short("the job's name", name)?;
        Ok(Self { name: name.into(), start })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of this start.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (start {})", self.name, self.start)
    }
}

/// What all ranks of a job must agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    world: u32,
    build: Box<str>,
    config: u64,
}

impl Terms {
    /// A world of so many ranks, of this version of the crate, with a digest of 0.
    ///
    /// # Errors
    /// [`ControlError::World`] if it has none, or more than [`MOST_RANKS`].
    pub fn new(world: u32) -> Result<Self, ControlError> {
        if world == 0 || world > MOST_RANKS {
            return Err(ControlError::World { world, most: MOST_RANKS });
        }
        Ok(Self { world, build: env!("CARGO_PKG_VERSION").into(), config: 0 })
    }

    /// The same, with what tells programs apart: a hash of the build, say.
    ///
    /// # Errors
    /// [`ControlError::TooLong`] if it has more than 256 bytes.
    pub fn build(self, build: &str) -> Result<Self, ControlError> {
        short("the build", build)?;
        Ok(Self { build: build.into(), ..self })
    }

    /// The same, with a digest of whatever else the ranks must have alike.
    #[must_use]
    pub fn config(self, config: u64) -> Self {
        Self { config, ..self }
    }

    /// Ranks in the world.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.world
    }

    pub(crate) fn build_name(&self) -> &str {
        &self.build
    }

    pub(crate) fn digest(&self) -> u64 {
        self.config
    }

    /// All ranks, in order.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.world as usize).map(Rank::new)
    }
}

/// A rank, and where it is.
///
/// Displayed as `rank 1 (process 4242 on node7, from 10.0.0.7:40112)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub(crate) rank: Rank,
    pub(crate) host: Box<str>,
    pub(crate) pid: u32,
    pub(crate) from: SocketAddr,
}

impl Member {
    /// Its rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The host, as it named itself.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The process, as it named itself.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// From where its connection came.
    #[must_use]
    pub fn from(&self) -> SocketAddr {
        self.from
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, host, pid, from } = self;
        write!(f, "rank {rank} (process {pid} on {host}, from {from})")
    }
}

/// This host's name, as the kernel has it.
pub(crate) fn host() -> String {
    cut(&rustix::system::uname().nodename().to_string_lossy())
}

/// Refuses what does not fit into a string of the protocol.
pub(crate) fn short(what: &'static str, text: &str) -> Result<(), ControlError> {
    let bytes = text.len();
    if bytes <= MOST_STRING {
        Ok(())
    } else {
        Err(ControlError::TooLong { what, bytes, most: MOST_STRING })
    }
}
