//! The authenticated messages between members and their coordinator.

use std::time::Duration;

use hsdp_sharding::Rank;
use prost::bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Malformed, TAG};
use crate::limits::{MOST_MESSAGE, short};
use crate::{Deadlines, Loss, RendezvousError, State};

/// A message of one side, and the words for the losses that its receiver observes.
pub trait WireMessage: Serialize + DeserializeOwned {
    /// A message failed authentication.
    const FORGED: &str;
    /// The connection has ended.
    const ENDED: &str;
    /// The message is authentic, and out of bounds.
    const INVALID: &str;

    /// The body, in a message that has one.
    fn body(&mut self) -> Option<&mut Body>;

    /// Checks the content against bounds that its type does not have.
    ///
    /// # Errors
    /// [`Malformed`]
    fn check(&self) -> Result<(), Malformed>;

    /// Encodes the message, without its body.
    fn write(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("numbers, texts and lists are written into memory")
    }

    /// Decodes a message with its body, and checks it against its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is unknown or out of bounds.
    fn read(bytes: &[u8], body: Body) -> Result<Self, Malformed> {
        let (mut message, rest): (Self, _) = postcard::take_from_bytes(bytes)
            .map_err(|_| Malformed("bytes that cannot be decoded"))?;
        if !rest.is_empty() {
            return Err(Malformed("bytes after the message"));
        }
        match message.body() {
            Some(_) if body.bytes.len() > MOST_MESSAGE => {
                return Err(Malformed("a message of more than 64 KiB"));
            }
            Some(place) => *place = body,
            None if !body.bytes.is_empty() => return Err(Malformed("a body in a message of none")),
            None => {}
        }
        message.check().map(|()| message)
    }
}

/// The bytes of a message between members, and their digest. The digest is computed once, for the
/// MACs of all receivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    /// The bytes.
    pub bytes: Bytes,
    /// Their SHA-256.
    pub(crate) digest: [u8; TAG],
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Self {
        let digest = Sha256::digest(&bytes).into();
        Self { bytes, digest }
    }
}

impl Default for Body {
    fn default() -> Self {
        Bytes::new().into()
    }
}

/// A message of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromMember {
    /// A heartbeat.
    Beat,
    /// The member leaves.
    Goodbye,
    /// A message for other members, in the order of ranks, with a number for each of them.
    Pass(Vec<(Rank, u32)>, #[serde(skip)] Body),
    /// The member ends its connection because of an error of this kind.
    Quit(Loss),
}

/// A message of the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromCoordinator {
    /// A heartbeat.
    Beat,
    /// All ranks have joined.
    Welcome {
        /// The time between two heartbeats of all members.
        beat: Duration,
        /// The number of heartbeats that a member may miss before it is lost.
        lost: u32,
    },
    /// The rendezvous has failed, or the receiver cannot join.
    Failed(RendezvousError),
    /// The state of a member has changed.
    Changed(Rank, State),
    /// A message of another member, with the number for this one.
    Passed((Rank, u32), #[serde(skip)] Body),
    /// The answer to a goodbye.
    Farewell,
    /// The receiver is lost, for this reason: it is no longer a member.
    Ended(#[serde(deserialize_with = "short")] String),
}

impl WireMessage for FromMember {
    const FORGED: &str = "a message from it failed authentication";
    const ENDED: &str = "its connection ended before it left";
    const INVALID: &str = "it sent a message that no member sends";

    fn body(&mut self) -> Option<&mut Body> {
        if let Self::Pass(_, body) = self { Some(body) } else { None }
    }

    fn check(&self) -> Result<(), Malformed> {
        match self {
            Self::Pass(to, _) if !to.is_sorted_by(|one, next| one.0 < next.0) => {
                Err(Malformed("receivers that are not in order"))
            }
            _ => Ok(()),
        }
    }
}

impl WireMessage for FromCoordinator {
    const FORGED: &str = "a message to it failed authentication";
    const ENDED: &str = "its connection ended";
    const INVALID: &str = "it got a message that no coordinator sends";

    fn body(&mut self) -> Option<&mut Body> {
        if let Self::Passed(_, body) = self { Some(body) } else { None }
    }

    fn check(&self) -> Result<(), Malformed> {
        let Self::Welcome { beat, lost } = *self else { return Ok(()) };
        let deadlines = Deadlines { beat, lost, ..Deadlines::default() };
        deadlines.check().map_err(|_| Malformed("intervals that are out of range"))
    }
}

impl FromCoordinator {
    /// Whether it is the last message of a connection.
    pub(crate) fn is_last(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Farewell | Self::Ended(_))
    }
}
