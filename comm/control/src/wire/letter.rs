//! The authenticated messages between members and their coordinator.

use prost::Message as _;
use prost::bytes::Bytes;

use super::{Failure, Malformed, string, value};
use crate::limits::MOST_RANKS;

/// A message of a member, as it is encoded.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberLetter {
    /// The message.
    #[prost(oneof = "FromMember", tags = "1, 2, 3, 4, 5, 6")]
    pub says: Option<FromMember>,
}

/// A message of a member.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FromMember {
    /// A heartbeat.
    #[prost(message, tag = "1")]
    Beat(()),
    /// The member's part in a round.
    #[prost(message, tag = "2")]
    Give(Give),
    /// The end of the job.
    #[prost(message, tag = "3")]
    Abort(Abort),
    /// The member leaves.
    #[prost(message, tag = "4")]
    Goodbye(()),
    /// A message for another member.
    #[prost(message, tag = "5")]
    Pass(Pass),
    /// The member ends its connection because of an error.
    #[prost(message, tag = "6")]
    Quit(Quit),
}

/// A member's part in a round.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Give {
    /// The key of the round.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The kind of round that the member joins.
    #[prost(enumeration = "RoundKind", tag = "2")]
    pub kind: i32,
    /// Its value, if it gives one.
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub value: Option<Bytes>,
}

/// The kind of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum RoundKind {
    /// Every rank gives a value, and gets the values of all.
    Exchange = 0,
    /// One rank gives a value, and every rank gets it.
    Broadcast = 1,
}

/// A message of one member to another.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Pass {
    /// From a member to the coordinator: the receiver. From the coordinator to a member: the sender.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// The message.
    #[prost(bytes = "bytes", tag = "2")]
    pub what: Bytes,
}

/// The end of the job, by a member.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Abort {
    /// The reason.
    #[prost(string, tag = "1")]
    pub reason: String,
}

/// The error because of which a member ends its connection.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Quit {
    /// The kind of error.
    #[prost(enumeration = "Loss", tag = "1")]
    pub loss: i32,
}

/// A message of the coordinator, as it is encoded.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CoordinatorLetter {
    /// The message.
    #[prost(oneof = "FromCoordinator", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11")]
    pub says: Option<FromCoordinator>,
}

/// A message of the coordinator.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FromCoordinator {
    /// A heartbeat.
    #[prost(message, tag = "1")]
    Beat(()),
    /// A member of the world.
    #[prost(message, tag = "2")]
    Present(Present),
    /// All ranks have joined.
    #[prost(message, tag = "3")]
    Welcome(Welcome),
    /// The rendezvous has failed, or the receiver cannot join.
    #[prost(message, tag = "4")]
    Failed(Failure),
    /// A value of a round.
    #[prost(message, tag = "5")]
    Value(Value),
    /// A round has failed.
    #[prost(message, tag = "6")]
    RoundFailed(RoundFailed),
    /// The state of a member has changed.
    #[prost(message, tag = "7")]
    Changed(Changed),
    /// A member has ended the job.
    #[prost(message, tag = "8")]
    Aborted(Aborted),
    /// The answer to a goodbye.
    #[prost(message, tag = "9")]
    Farewell(()),
    /// The receiver is lost: it is no longer a member.
    #[prost(message, tag = "10")]
    Ended(Ended),
    /// A message of another member.
    #[prost(message, tag = "11")]
    Passed(Pass),
}

/// A member of the world.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Present {
    /// Its rank.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// Its host.
    #[prost(string, tag = "2")]
    pub host: String,
    /// Its process id.
    #[prost(uint32, tag = "3")]
    pub pid: u32,
    /// The address and port from which it has connected.
    #[prost(string, tag = "4")]
    pub from: String,
}

/// The intervals that hold for all members.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Welcome {
    /// Milliseconds between two heartbeats.
    #[prost(uint32, tag = "1")]
    pub beat: u32,
    /// The number of heartbeats that a member may miss before it is suspected.
    #[prost(uint32, tag = "2")]
    pub suspect: u32,
    /// The number of heartbeats that a member may miss before it is lost.
    #[prost(uint32, tag = "3")]
    pub lost: u32,
    /// The deadline of a round, in milliseconds.
    #[prost(uint32, tag = "4")]
    pub round: u32,
}

/// A value of a round.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// The key of the round.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The rank that gave the value.
    #[prost(uint32, tag = "2")]
    pub rank: u32,
    /// The value.
    #[prost(bytes = "bytes", tag = "3")]
    pub value: Bytes,
}

/// A round has failed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RoundFailed {
    /// The key of the round.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The reason.
    #[prost(message, optional, tag = "2")]
    pub failure: Option<Failure>,
}

/// The state of a member has changed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Changed {
    /// The member.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// Its new state.
    #[prost(enumeration = "Standing", tag = "2")]
    pub standing: i32,
    /// The reason, if it is lost.
    #[prost(string, tag = "3")]
    pub why: String,
    /// The kind of that reason.
    #[prost(enumeration = "Loss", tag = "4")]
    pub loss: i32,
}

/// The kind of reason for which a member is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Loss {
    /// Its connection ended before it left. Its process may be gone, or the connection was cut.
    Ended = 0,
    /// Nothing arrived from it, or nothing was delivered to it, for too long. Its process may be stopped, or the network cut.
    Silent = 1,
    /// A message from it or to it failed authentication: it was changed on the way, or another process has sent it.
    Forged = 2,
    /// It has sent, or was sent, an authenticated message that does not follow the protocol.
    Invalid = 3,
}

/// The state of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Standing {
    /// Its heartbeats arrive.
    Alive = 0,
    /// It has missed heartbeats.
    Suspect = 1,
    /// It has left.
    Finished = 2,
    /// It is lost.
    Lost = 3,
}

/// A member has ended the job.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Aborted {
    /// The member.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// Its reason.
    #[prost(string, tag = "2")]
    pub reason: String,
}

/// The receiver is no longer a member.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Ended {
    /// The reason.
    #[prost(string, tag = "1")]
    pub why: String,
}

impl MemberLetter {
    /// Decodes a message of a member, and checks it against its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is unknown or out of bounds.
    pub fn read(bytes: &[u8]) -> Result<FromMember, Malformed> {
        let letter = Self::decode(bytes).map_err(|_| Malformed("bytes that cannot be decoded"))?;
        let says = letter.says.ok_or(Malformed("an empty message"))?;
        match &says {
            FromMember::Beat(()) | FromMember::Goodbye(()) => {}
            FromMember::Give(give) => {
                string(&give.key, "a key that is too long")?;
                RoundKind::try_from(give.kind).map_err(|_| Malformed("an unknown kind"))?;
                value(give.value.as_deref().unwrap_or_default())?;
            }
            FromMember::Abort(abort) => string(&abort.reason, "a reason that is too long")?,
            FromMember::Pass(pass) => pass.check()?,
            FromMember::Quit(Quit { loss }) => known(*loss)?,
        }
        Ok(says)
    }
}

impl CoordinatorLetter {
    /// Decodes a message of the coordinator, and checks it against its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is unknown or out of bounds.
    pub fn read(bytes: &[u8]) -> Result<FromCoordinator, Malformed> {
        let letter = Self::decode(bytes).map_err(|_| Malformed("bytes that cannot be decoded"))?;
        let says = letter.says.ok_or(Malformed("an empty message"))?;
        says.check()?;
        Ok(says)
    }
}

impl FromCoordinator {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            Self::Beat(()) | Self::Farewell(()) => Ok(()),
            Self::Present(present) => {
                rank(present.rank)?;
                string(&present.host, "a host's name that is too long")
            }
            Self::Welcome(Welcome { beat: 0, .. }) => Err(Malformed("no time between heartbeats")),
            Self::Welcome(welcome) if welcome.lost > 1_000_000 || welcome.suspect > 1_000_000 => {
                Err(Malformed("an interval that is too long"))
            }
            Self::Welcome(_) => Ok(()),
            Self::Failed(failure) => failure.check(),
            Self::Value(given) => {
                rank(given.rank)?;
                string(&given.key, "a key that is too long")?;
                value(&given.value)
            }
            Self::RoundFailed(failed) => {
                string(&failed.key, "a key that is too long")?;
                failed.failure.as_ref().ok_or(Malformed("no failure"))?.check()
            }
            Self::Changed(changed) => {
                rank(changed.rank)?;
                Standing::try_from(changed.standing).map_err(|_| Malformed("an unknown state"))?;
                known(changed.loss)?;
                string(&changed.why, "a reason that is too long")
            }
            Self::Aborted(aborted) => {
                rank(aborted.rank)?;
                string(&aborted.reason, "a reason that is too long")
            }
            Self::Ended(ended) => string(&ended.why, "a reason that is too long"),
            Self::Passed(pass) => pass.check(),
        }
    }

    /// Whether it is the last message of a connection.
    pub(crate) fn is_last(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Farewell(()) | Self::Ended(_))
    }
}

impl Pass {
    fn check(&self) -> Result<(), Malformed> {
        rank(self.rank)?;
        value(&self.what)
    }
}

fn known(loss: i32) -> Result<(), Malformed> {
    Loss::try_from(loss).map(drop).map_err(|_| Malformed("an unknown kind of loss"))
}

fn rank(rank: u32) -> Result<(), Malformed> {
    if rank < MOST_RANKS { Ok(()) } else { Err(Malformed("a rank that no world has")) }
}
