//! One message of the stream, in either direction.

use std::error::Error as _;

use prost::bytes::Bytes;
use tonic::Status;

use super::{Challenge, Hello, Loss, Malformed, Proof, Refusal, tag};
use crate::limits::MOST_FRAME;

/// One message of the stream.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Frame {
    /// The kind of message.
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5")]
    pub kind: Option<Kind>,
}

/// The kinds of frame.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Kind {
    /// A member's first frame.
    #[prost(message, tag = "1")]
    Hello(Hello),
    /// The coordinator's first frame.
    #[prost(message, tag = "2")]
    Challenge(Challenge),
    /// A member's second frame.
    #[prost(message, tag = "3")]
    Proof(Proof),
    /// The coordinator's last frame to a connection that it refuses.
    #[prost(message, tag = "4")]
    Refusal(Refusal),
    /// Every frame after the handshake.
    #[prost(message, tag = "5")]
    Sealed(Sealed),
}

/// An authenticated message: a message with its MAC.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Sealed {
    /// The message, encoded.
    #[prost(bytes = "bytes", tag = "1")]
    pub letter: Bytes,
    /// The MAC of the message and of its number in this direction.
    #[prost(bytes = "bytes", tag = "2")]
    pub seal: Bytes,
}

impl Frame {
    /// The frame of an authenticated connection, or the kind of loss that the result of the read shows. Bytes that cannot be decoded
    /// have no MAC, so they count as forged.
    pub(crate) fn arrived(read: Result<Option<Self>, Status>) -> Result<Self, Loss> {
        match read {
            Ok(Some(frame)) => Ok(frame),
            // A status with a source is an error of HTTP/2 or of the system. Any other status is about the bytes themselves.
            Err(status) if status.source().is_none() => Err(Loss::Forged),
            Ok(None) | Err(_) => Err(Loss::Ended),
        }
    }

    /// The authenticated message in the frame, if it has one.
    pub(crate) fn sealed(self) -> Option<Sealed> {
        match self.checked() {
            Ok(Kind::Sealed(sealed)) => Some(sealed),
            Ok(_) | Err(_) => None,
        }
    }

    /// The content of the frame, checked against its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is unknown or out of bounds.
    pub fn checked(self) -> Result<Kind, Malformed> {
        let kind = self.kind.ok_or(Malformed("an empty frame"))?;
        match &kind {
            Kind::Hello(hello) => hello.check()?,
            Kind::Challenge(challenge) => challenge.check()?,
            Kind::Proof(Proof { proof }) => tag(proof, "a proof of the wrong length")?,
            Kind::Refusal(refusal) => refusal.check()?,
            Kind::Sealed(sealed) => {
                tag(&sealed.seal, "a MAC of the wrong length")?;
                if sealed.letter.len() > MOST_FRAME {
                    return Err(Malformed("a message that is too long"));
                }
            }
        }
        Ok(kind)
    }
}

impl From<Kind> for Frame {
    fn from(kind: Kind) -> Self {
        Self { kind: Some(kind) }
    }
}
