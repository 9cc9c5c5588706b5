//! The authenticated messages between members and their coordinator.

use prost::Message as _;
use prost::bytes::Bytes;

use super::{Failure, Malformed, rank, string};
use crate::limits::MOST_MESSAGE;

/// A message of one side, and the words for the losses that its receiver observes.
pub trait Message: Sized {
    /// A message failed authentication.
    const FORGED: &str;
    /// The connection has ended.
    const ENDED: &str;
    /// The message is authentic, and out of bounds.
    const INVALID: &str;

    /// Encodes the message.
    fn write(self) -> Vec<u8>;

    /// Decodes a message, and checks it against its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is unknown or out of bounds.
    fn read(bytes: &[u8]) -> Result<Self, Malformed>;
}

/// A message of a member.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FromMember {
    /// A heartbeat.
    #[prost(message, tag = "1")]
    Beat(()),
    /// The member leaves.
    #[prost(message, tag = "2")]
    Goodbye(()),
    /// A message for another member.
    #[prost(message, tag = "3")]
    Pass(Pass),
    /// The member ends its connection because of an error of this kind.
    #[prost(enumeration = "Loss", tag = "4")]
    Quit(i32),
}

/// A message of one member to another.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Pass {
    /// From a member to the coordinator: the receiver. From the coordinator to a member: the sender.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// The message.
    #[prost(bytes = "bytes", tag = "2")]
    pub payload: Bytes,
}

/// A message of the coordinator.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FromCoordinator {
    /// A heartbeat.
    #[prost(message, tag = "1")]
    Beat(()),
    /// All ranks have joined.
    #[prost(message, tag = "2")]
    Welcome(Welcome),
    /// The rendezvous has failed, or the receiver cannot join.
    #[prost(message, tag = "3")]
    Failed(Failure),
    /// The state of a member has changed.
    #[prost(message, tag = "4")]
    Changed(Changed),
    /// A message of another member.
    #[prost(message, tag = "5")]
    Passed(Pass),
    /// The answer to a goodbye.
    #[prost(message, tag = "6")]
    Farewell(()),
    /// The receiver is lost, for this reason: it is no longer a member.
    #[prost(string, tag = "7")]
    Ended(String),
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

/// A message of a member, as it is encoded.
#[derive(Clone, PartialEq, prost::Message)]
struct MemberMessage {
    #[prost(oneof = "FromMember", tags = "1, 2, 3, 4")]
    message: Option<FromMember>,
}

/// A message of the coordinator, as it is encoded.
#[derive(Clone, PartialEq, prost::Message)]
struct CoordinatorMessage {
    #[prost(oneof = "FromCoordinator", tags = "1, 2, 3, 4, 5, 6, 7")]
    message: Option<FromCoordinator>,
}

impl Message for FromMember {
    const FORGED: &str = "a message from it failed authentication";
    const ENDED: &str = "its connection ended before it left";
    const INVALID: &str = "it sent a message that no member sends";

    fn write(self) -> Vec<u8> {
        MemberMessage { message: Some(self) }.encode_to_vec()
    }

    fn read(bytes: &[u8]) -> Result<Self, Malformed> {
        let MemberMessage { message } = decoded(bytes)?;
        let message = message.ok_or(EMPTY)?;
        match &message {
            Self::Beat(()) | Self::Goodbye(()) => Ok(()),
            Self::Pass(pass) => pass.check(),
            Self::Quit(loss) => known(*loss),
        }?;
        Ok(message)
    }
}

impl Message for FromCoordinator {
    const FORGED: &str = "a message to it failed authentication";
    const ENDED: &str = "its connection ended";
    const INVALID: &str = "it got a message that no coordinator sends";

    fn write(self) -> Vec<u8> {
        CoordinatorMessage { message: Some(self) }.encode_to_vec()
    }

    fn read(bytes: &[u8]) -> Result<Self, Malformed> {
        let CoordinatorMessage { message } = decoded(bytes)?;
        let message = message.ok_or(EMPTY)?;
        match &message {
            Self::Beat(()) | Self::Farewell(()) => Ok(()),
            Self::Welcome(welcome) => welcome.check(),
            Self::Failed(failure) => failure.error().map(drop),
            Self::Changed(changed) => changed.check(),
            Self::Passed(pass) => pass.check(),
            Self::Ended(why) => string(why, "a reason that is too long"),
        }?;
        Ok(message)
    }
}

const EMPTY: Malformed = Malformed("an empty message");

fn decoded<M: prost::Message + Default>(bytes: &[u8]) -> Result<M, Malformed> {
    M::decode(bytes).map_err(|_| Malformed("bytes that cannot be decoded"))
}

fn known(loss: i32) -> Result<(), Malformed> {
    Loss::try_from(loss).map(drop).map_err(|_| Malformed("an unknown kind of loss"))
}

impl FromCoordinator {
    /// Whether it is the last message of a connection.
    pub(crate) fn is_last(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Farewell(()) | Self::Ended(_))
    }
}

impl Pass {
    fn check(&self) -> Result<(), Malformed> {
        rank(self.rank)?;
        if self.payload.len() <= MOST_MESSAGE {
            Ok(())
        } else {
            Err(Malformed("a message of more than 64 KiB"))
        }
    }
}

impl Welcome {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            Self { beat: 0, .. } => Err(Malformed("no time between heartbeats")),
            Self { suspect: 0..=1_000_000, lost: 0..=1_000_000, .. } => Ok(()),
            _ => Err(Malformed("an interval that is too long")),
        }
    }
}

impl Changed {
    fn check(&self) -> Result<(), Malformed> {
        rank(self.rank)?;
        Standing::try_from(self.standing).map_err(|_| Malformed("an unknown state"))?;
        known(self.loss)?;
        string(&self.why, "a reason that is too long")
    }
}
