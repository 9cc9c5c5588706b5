//! The identity of a job, and the settings that its ranks share.

use std::fmt;
use std::net::SocketAddr;

use hsdp_sharding::Rank;

use crate::ControlError;
use crate::limits::{MOST_RANKS, MOST_STRING, cut};

/// The identity of a job: a name, and a number that differs at each start of the job.
///
/// It is not secret. The number distinguishes a coordinator that is left over from an earlier start.
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

    /// The name.
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

/// The settings that all ranks of a job must share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    world: u32,
    build: Box<str>,
    config: u64,
}

impl Terms {
    /// The terms of a world of `world` ranks, with this version of the crate as the build, and a digest of 0.
    ///
    /// # Errors
    /// [`ControlError::World`] if `world` is 0, or more than [`MOST_RANKS`].
    pub fn new(world: u32) -> Result<Self, ControlError> {
        if world == 0 || world > MOST_RANKS {
            return Err(ControlError::World { world, most: MOST_RANKS });
        }
        Ok(Self { world, build: env!("CARGO_PKG_VERSION").into(), config: 0 })
    }

    /// Sets the build, a text that distinguishes programs: a hash of the binary, for example.
    ///
    /// # Errors
    /// [`ControlError::TooLong`] if it has more than 256 bytes.
    pub fn build(self, build: &str) -> Result<Self, ControlError> {
        short("the build", build)?;
        Ok(Self { build: build.into(), ..self })
    }

    /// Sets the digest of all other settings that the ranks must share.
    #[must_use]
    pub fn config(self, config: u64) -> Self {
        Self { config, ..self }
    }

    /// The number of ranks in the world.
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

/// A rank, with its host, process and address.
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
    /// The rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The host's name, as the process reports it.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The process id, as the process reports it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The address from which it has connected.
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

/// Refuses a text that is too long for a string of the protocol.
pub(crate) fn short(what: &'static str, text: &str) -> Result<(), ControlError> {
    let bytes = text.len();
    if bytes <= MOST_STRING {
        Ok(())
    } else {
        Err(ControlError::TooLong { what, bytes, most: MOST_STRING })
    }
}
