//! What can go wrong, with every number.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use hsdp_sharding::Rank;

use crate::{Job, Member};

/// An error of a rendezvous, of a call among members, or of what was asked for.
///
/// All members get the same value of those that are about all: `Incomplete`, `ConfigMismatch`, `Late`, `Absent`, `MixedRound`, `Givers`,
/// `Aborted`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Not all ranks have come to the rendezvous.
    #[error("after {after:?} ranks {} have not come; {} have", Ranks(.missing), Ranks(.came))]
    Incomplete {
        /// The deadline.
        after: Duration,
        /// Who is missing.
        missing: Vec<Rank>,
        /// Who is there.
        came: Vec<Rank>,
    },
    /// A rank is there already, or was. The first one stays.
    #[error("{second} is refused: {first} has that place")]
    DuplicateRank {
        /// Who has the place.
        first: Member,
        /// Who was refused.
        second: Member,
    },
    /// A rank differs from the coordinator in what all must agree on.
    #[error("{what} differs: {member} has {found}, the coordinator has {expected}")]
    ConfigMismatch {
        /// What differs.
        what: Subject,
        /// Who differs.
        member: Member,
        /// What it has.
        found: String,
        /// What the coordinator has.
        expected: String,
    },
    /// What answers at the address is the coordinator of another job, or of another start of this one.
    #[error("the coordinator at {server} serves the job {found}, this is {wanted}")]
    OtherJob {
        /// Where.
        server: SocketAddr,
        /// The job of this process.
        wanted: Job,
        /// The job that is served.
        found: Job,
    },
    /// What answers at the address has not proved that it knows the job's secret.
    #[error(
        "what answers at {server} does not know the secret of the job {job}: another secret, or no coordinator of ours"
    )]
    Secret {
        /// Where.
        server: SocketAddr,
        /// The job.
        job: Job,
    },
    /// The coordinator has refused this process.
    #[error("the coordinator at {server} refused rank {rank}: {reason}")]
    Refused {
        /// Where.
        server: SocketAddr,
        /// Who was refused.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// Until the deadline there was no coordinator at the address.
    #[error("after {after:?} rank {rank} has found no coordinator at {server}: {found}")]
    Unreachable {
        /// Where.
        server: SocketAddr,
        /// Who looked for it.
        rank: Rank,
        /// How long.
        after: Duration,
        /// What was found instead, at last.
        found: String,
    },
    /// The coordinator cannot listen.
    #[error("the coordinator cannot listen at {address}: {problem}")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// What the system says.
        problem: String,
    },
    /// This process may not have so many files open as it needs for a connection to each member.
    #[error(
        "a world of {world} ranks: its coordinator needs {needed} open files, this process may have {most} (ulimit -n)"
    )]
    Descriptors {
        /// Ranks in the world.
        world: u32,
        /// How many it needs, at least.
        needed: u64,
        /// How many it may have.
        most: u64,
    },
    /// Not all ranks have come to an exchange or a broadcast.
    #[error("`{key}`: after {after:?} ranks {} have not come; {} have", Ranks(.missing), Ranks(.came))]
    Late {
        /// Which one.
        key: String,
        /// The deadline.
        after: Duration,
        /// Who is missing.
        missing: Vec<Rank>,
        /// Who has come.
        came: Vec<Rank>,
    },
    /// Ranks that an exchange or a broadcast needs are not there any more.
    #[error("`{key}` needs all ranks: lost {}, finished {}", Ranks(.lost), Ranks(.finished))]
    Absent {
        /// Which one.
        key: String,
        /// Who is lost.
        lost: Vec<Rank>,
        /// Who has said goodbye.
        finished: Vec<Rank>,
    },
    /// Some ranks exchange, and some broadcast, under one key.
    #[error("`{key}`: ranks {} exchange, ranks {} broadcast", Ranks(.exchange), Ranks(.broadcast))]
    MixedRound {
        /// The key.
        key: String,
        /// Who exchanges.
        exchange: Vec<Rank>,
        /// Who broadcasts.
        broadcast: Vec<Rank>,
    },
    /// Not exactly one rank gave a value to be broadcast.
    #[error("`{key}`: one rank gives what is broadcast, but ranks {} did", Ranks(.givers))]
    Givers {
        /// The key.
        key: String,
        /// Who gave.
        givers: Vec<Rank>,
    },
    /// More exchanges and broadcasts are open than may be.
    #[error("`{key}`: {most} keys are open already, the most there may be")]
    Crowded {
        /// The key that is one too many.
        key: String,
        /// How many may be open.
        most: usize,
    },
    /// This member is in an exchange or a broadcast of this key already.
    #[error("`{key}` is under way on rank {rank}, on another thread")]
    KeyBusy {
        /// The key.
        key: String,
        /// Who called.
        rank: Rank,
    },
    /// A member has ended the job.
    #[error("rank {rank} ended the job: {reason}")]
    Aborted {
        /// Who.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// The coordinator is gone, or has given this member up.
    #[error("rank {rank} has lost the coordinator at {server}: {problem}")]
    CoordinatorLost {
        /// Who has lost it.
        rank: Rank,
        /// Where it was.
        server: SocketAddr,
        /// What was seen of it.
        problem: String,
    },
    /// The coordinator was silent for too long: it, or this member, is on the wrong side of a cut.
    #[error("rank {rank} is cut off: nothing from the coordinator at {server} for {silent:?}")]
    CutOff {
        /// Who is cut off.
        rank: Rank,
        /// Where the coordinator was.
        server: SocketAddr,
        /// For how long, at least.
        silent: Duration,
    },
    /// Ranks are still there, and the coordinator was to end.
    #[error("after {after:?} ranks {} have neither said goodbye nor been lost", Ranks(.there))]
    StillThere {
        /// How long it was waited for.
        after: Duration,
        /// Who is there.
        there: Vec<Rank>,
    },
    /// A world cannot have so many ranks.
    #[error("a world of {world} ranks: there must be 1 to {most}")]
    World {
        /// How many were asked for.
        world: u32,
        /// How many there may be.
        most: u32,
    },
    /// A rank that is not in the world.
    #[error("rank {rank} of a world of {world}: ranks are numbered from 0 to {}", .world - 1)]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// Ranks in the world.
        world: u32,
    },
    /// A deadline that cannot be kept.
    #[error("the deadline `{what}`: {problem}")]
    Deadline {
        /// Which one.
        what: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A text or a value is too long.
    #[error("{what} has {bytes} bytes, at most {most} are carried")]
    TooLong {
        /// What.
        what: &'static str,
        /// Its bytes.
        bytes: usize,
        /// How many it may have.
        most: usize,
    },
    /// An environment variable is wrong or missing. Its value is not shown where it is a secret.
    #[error("{variable}{}: {problem}", .value.as_ref().map(|value| format!("={value}")).unwrap_or_default())]
    Environment {
        /// Which one.
        variable: &'static str,
        /// What it says.
        value: Option<String>,
        /// What is wrong with it.
        problem: String,
    },
    /// A file that should have the secret cannot be used.
    #[error("the secret in {}: {problem}", path.display())]
    SecretFile {
        /// Which one.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The system does not give what is needed: a thread, a socket, random numbers.
    #[error("cannot {action}: {problem}")]
    System {
        /// What was to be done.
        action: &'static str,
        /// What the system says.
        problem: String,
    },
}

impl ControlError {
    /// For `map_err`: what was to be done.
    pub(crate) fn system<E: fmt::Display>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::System { action, problem: error.to_string() }
    }
}

/// What ranks can differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Ranks as `[0, 1]`.
struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|rank| rank.get())).finish()
    }
}
