//! The errors of this crate, with every number.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use crate::limits::short;
use crate::{Job, Member};

/// An error of a rendezvous, of a call among members, or of the arguments.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The coordinator has refused this process, or the rendezvous has failed.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// This process cannot become a member.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The connection of this member to the coordinator has ended.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The coordinator cannot begin, or cannot end.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// An argument or a variable is refused.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// The system refused a thread, a socket or random numbers.
    #[error("cannot {action}: {problem}")]
    System {
        /// The action that failed.
        action: &'static str,
        /// The error of the system.
        problem: String,
    },
}

/// A refusal of one process, or the end of a rendezvous, which the coordinator sends. All members get the same value of
/// `Incomplete` and `ConfigMismatch`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Not all ranks joined the rendezvous in time.
    #[error("after {after:?} ranks {:?} have not joined; ranks {:?} have", numbers(.missing), numbers(.came))]
    Incomplete {
        /// The deadline.
        after: Duration,
        /// The ranks that are missing.
        missing: Vec<Rank>,
        /// The ranks that joined.
        came: Vec<Rank>,
    },
    /// Another process has joined as this rank. That process keeps the rank, also after it is lost.
    #[error("{second} is refused: {first} has joined as that rank")]
    DuplicateRank {
        /// The process that has the rank.
        first: Member,
        /// The process that was refused.
        second: Member,
    },
    /// A rank differs from the coordinator in a setting that all ranks must share.
    #[error("{what} differs: {member} has {found}, the coordinator has {expected}")]
    ConfigMismatch {
        /// The setting.
        what: Subject,
        /// The rank that differs.
        member: Member,
        /// Its value.
        #[serde(deserialize_with = "short")]
        found: String,
        /// The value of the coordinator.
        #[serde(deserialize_with = "short")]
        expected: String,
    },
}

/// A process that does not become a member.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The coordinator at the address serves another job, or another start of this job.
    #[error("the coordinator at {server} serves the job {found}, this is {wanted}")]
    OtherJob {
        /// The address.
        server: SocketAddr,
        /// The job of this process.
        wanted: Job,
        /// The job that is served.
        found: Job,
    },
    /// The process at the address did not prove that it knows the job's secret.
    #[error(
        "the process at {server} does not know the secret of the job {job}: it has another secret, or is not an hsdp coordinator"
    )]
    Secret {
        /// The address.
        server: SocketAddr,
        /// The job.
        job: Job,
    },
    /// The coordinator has refused this process.
    #[error("the coordinator at {} refused rank {}: {reason}", .ends.server, .ends.rank)]
    Refused {
        /// The ends of the connection.
        ends: Ends,
        /// The reason.
        reason: String,
    },
    /// Until the deadline there was no coordinator at the address.
    #[error("after {after:?} rank {} has found no coordinator at {}: {found}", .ends.rank, .ends.server)]
    Unreachable {
        /// The rank that tried to connect, and the address.
        ends: Ends,
        /// The time for which it tried.
        after: Duration,
        /// The result of the last attempt.
        found: String,
    },
}

/// The end of a member's connection to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The connection to the coordinator has ended, or the coordinator reads or answers nothing.
    #[error("rank {} has lost the coordinator at {}: {problem}", .ends.rank, .ends.server)]
    CoordinatorLost {
        /// The ends of the connection.
        ends: Ends,
        /// The problem that the member observed.
        problem: String,
    },
    /// The coordinator has declared this member lost.
    #[error("the coordinator at {} has declared rank {} lost: {why}", .ends.server, .ends.rank)]
    DeclaredLost {
        /// The ends of the connection.
        ends: Ends,
        /// The reason that the coordinator gives.
        why: String,
    },
    /// A message to this member was not a message of the coordinator, so the member has ended its
    /// connection.
    #[error("rank {} has ended its connection to the coordinator at {}: {problem}", .ends.rank, .ends.server)]
    BadMessage {
        /// The ends of the connection.
        ends: Ends,
        /// The problem with the message.
        problem: String,
    },
    /// The coordinator was silent for too long: its process may be stopped, or the network between
    /// it and this member cut.
    #[error("rank {} is cut off: nothing from the coordinator at {} for {silent:?}", .ends.rank, .ends.server)]
    CutOff {
        /// The ends of the connection.
        ends: Ends,
        /// The time of silence, at least.
        silent: Duration,
    },
}

/// A coordinator that cannot begin, or cannot end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The coordinator cannot listen.
    #[error("the coordinator cannot listen at {address}: {problem}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        problem: String,
    },
    /// The limit on open files of this process is too low for a connection to each member.
    #[error(
        "a world of {world} ranks: its coordinator needs {needed} open files, this process may have {most} (ulimit -n)"
    )]
    Descriptors {
        /// Ranks in the world.
        world: u32,
        /// The number of open files that it needs, at least.
        needed: u64,
        /// The limit.
        most: u64,
    },
    /// Ranks are still connected at the deadline for the end of the coordinator.
    #[error("after {after:?} ranks {:?} have neither left nor been lost", numbers(.there))]
    StillThere {
        /// The deadline.
        after: Duration,
        /// The ranks that are still connected.
        there: Vec<Rank>,
    },
}

/// An argument or a variable that is refused. Nothing was done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// The number of ranks is out of range.
    #[error("a world of {world} ranks: there must be 1 to {most}")]
    World {
        /// The number of ranks that was asked for.
        world: u32,
        /// The limit.
        most: u32,
    },
    /// The world has no such rank.
    #[error("rank {rank} of a world of {world}: ranks are numbered from 0 to {}", .world - 1)]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// Ranks in the world.
        world: u32,
    },
    /// A deadline is out of range.
    #[error("the deadline `{what}`: {problem}")]
    Deadline {
        /// The deadline.
        what: &'static str,
        /// The problem with it.
        problem: String,
    },
    /// A text or a message is too long.
    #[error("{what} has {bytes} bytes, at most {most} are allowed")]
    TooLong {
        /// The text or message.
        what: &'static str,
        /// Its bytes.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// An environment variable is wrong or missing. The value of a secret is not shown.
    #[error("{variable}{}: {problem}", .value.as_ref().map(|value| format!("={value}")).unwrap_or_default())]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Its value, if it is set and no secret.
        value: Option<String>,
        /// The problem with it.
        problem: String,
    },
    /// The file of the secret cannot be used.
    #[error("the secret in {}: {problem}", path.display())]
    SecretFile {
        /// The file.
        path: PathBuf,
        /// The problem with it.
        problem: String,
    },
}

impl ControlError {
    /// For `map_err`: an error of the system in this action.
    pub(crate) fn system<E: fmt::Display>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::System { action, problem: error.to_string() }
    }
}

/// The two ends of a member's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The rank of the member.
    pub rank: Rank,
    /// The address of the coordinator.
    pub server: SocketAddr,
}

/// A setting that all ranks must share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Subject {
    /// The version of the protocol.
    Protocol,
    /// The number of ranks.
    WorldSize,
    /// The build of the program.
    Build,
    /// The digest of the configuration.
    Config,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Protocol => "the protocol's version",
            Self::WorldSize => "the world size",
            Self::Build => "the build",
            Self::Config => "the configuration's digest",
        })
    }
}

/// Ranks, to be shown as `[0, 1]`.
fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.get()).collect()
}
