//! The identity of a job, and the settings that its ranks share.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use crate::limits::{MOST_RANKS, MOST_STRING, cut};
use crate::wire::short;
use crate::{ControlError, Deadlines, Secret};

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
    /// The number of ranks, 1 to [`MOST_RANKS`].
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

/// The settings with which a coordinator starts, and with which members join.
///
/// Its fields can be changed, as in `Options { address, ..options }`.
#[derive(Clone, Debug)]
pub struct Options {
    /// The address at which the coordinator listens, and to which members connect. A coordinator takes any free port for
    /// port 0, and refuses an address that stands for all addresses, since messages are not encrypted.
    pub address: SocketAddr,
    /// The job.
    pub job: Job,
    /// Its secret.
    pub secret: Secret,
    /// The settings that all ranks must share.
    pub terms: Terms,
    /// The deadlines. Those of the coordinator hold for all members, except `rendezvous` and `handshake`.
    pub deadlines: Deadlines,
}

impl Options {
    /// Options of `job` on this machine alone: at 127.0.0.1 and any free port, with the default deadlines.
    #[must_use]
    pub fn new(job: Job, secret: Secret, terms: Terms) -> Self {
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        Self { address, job, secret, terms, deadlines: Deadlines::default() }
    }

    /// Refuses values that are out of range.
    pub(crate) fn check(&self) -> Result<(), ControlError> {
        check_world(self.terms.world)?;
        for (what, text) in [("the job's name", &self.job.name), ("the build", &self.terms.build)] {
            if text.len() > MOST_STRING {
                let bytes = text.len();
                return Err(ControlError::TooLong { what, bytes, most: MOST_STRING });
            }
        }
        self.deadlines.check()
    }
}

pub(crate) fn check_world(world: u32) -> Result<(), ControlError> {
    let most = MOST_RANKS;
    if (1..=most).contains(&world) { Ok(()) } else { Err(ControlError::World { world, most }) }
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
