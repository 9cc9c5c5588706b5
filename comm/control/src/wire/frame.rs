//! One message of the stream, in either direction.

use prost::bytes::Bytes;

use super::{Challenge, Hello, Malformed, Proof, Refusal, tag};
use crate::limits::MOST_FRAME;

/// One message of the stream.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Frame {
    /// What it is.
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5")]
    pub kind: Option<Kind>,
}

/// What a frame is.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Kind {
    /// A member's first.
    #[prost(message, tag = "1")]
    Hello(Hello),
    /// The coordinator's first.
    #[prost(message, tag = "2")]
    Challenge(Challenge),
    /// A member's second.
    #[prost(message, tag = "3")]
    Proof(Proof),
    /// The coordinator's last to a stranger.
    #[prost(message, tag = "4")]
    Refusal(Refusal),
    /// Everything else.
    #[prost(message, tag = "5")]
    Sealed(Sealed),
}

/// A letter with its seal.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Sealed {
    /// The letter, encoded.
    #[prost(bytes = "bytes", tag = "1")]
    pub letter: Bytes,
    /// Over its number and itself.
    #[prost(bytes = "bytes", tag = "2")]
    pub seal: Bytes,
}

impl Frame {
    /// What it is, within its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is nothing known, or out of bounds.
    pub fn checked(self) -> Result<Kind, Malformed> {
        let kind = self.kind.ok_or(Malformed("an empty frame"))?;
        match &kind {
            Kind::Hello(hello) => hello.check()?,
            Kind::Challenge(challenge) => challenge.check()?,
            Kind::Proof(Proof { proof }) => tag(proof, "a proof that is none")?,
            Kind::Refusal(refusal) => refusal.check()?,
            Kind::Sealed(sealed) => {
                tag(&sealed.seal, "a seal that is none")?;
                if sealed.letter.len() > MOST_FRAME {
                    return Err(Malformed("a letter that is too long"));
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
