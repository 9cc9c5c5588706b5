//! The identity of a job, the terms that its ranks share, and its members.

use std::fmt;
use std::net::SocketAddr;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use crate::limits::{cut, short};

/// The identity of a job. It is not secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name, of at most 256 bytes.
    pub name: String,
    /// A number that differs at each start of the job. It distinguishes a coordinator that is left over from an earlier
    /// start.
    pub start: u64,
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (start {})", self.name, self.start)
    }
}

/// The settings that all ranks of a job must share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The number of ranks, 1 to [`MOST_RANKS`](crate::MOST_RANKS).
    pub world: u32,
    /// A text of at most 256 bytes that distinguishes programs: a hash of the binary, for example.
    pub build: String,
    /// The digest of all other settings.
    pub config: u64,
}

impl Terms {
    /// The terms of a world of `world` ranks, with this version of the crate as the build, and a digest of 0.
    #[must_use]
    pub fn new(world: u32) -> Self {
        Self { world, build: env!("CARGO_PKG_VERSION").to_owned(), config: 0 }
    }
}

/// A rank, with its host, process and address.
///
/// Displayed as `rank 1 (process 4242 on node7, from 10.0.0.7:40112)`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The rank.
    pub rank: Rank,
    /// The host's name, as the process reports it.
    #[serde(deserialize_with = "short")]
    pub host: Box<str>,
    /// The process id, as the process reports it.
    pub pid: u32,
    /// The address and port from which it has connected.
    pub from: SocketAddr,
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
