//! One message of the stream, in either direction.

use prost::bytes::Bytes;

use super::{Challenge, Hello, Malformed, Proof, Refusal, tag};

/// One message of the stream.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Frame {
    /// The kind of message.
    #[prost(oneof = "FrameKind", tags = "1, 2, 3, 4, 5")]
    pub kind: Option<FrameKind>,
}

/// The kinds of frame.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FrameKind {
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
    Authenticated(Authenticated),
}

/// A message with its body, if it has one, and its MAC.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Authenticated {
    /// The message, encoded.
    #[prost(bytes = "bytes", tag = "1")]
    pub message: Bytes,
    /// The bytes for another member.
    #[prost(bytes = "bytes", tag = "2")]
    pub body: Bytes,
    /// The MAC of the message, of its number in this direction, and of the body's digest.
    #[prost(bytes = "bytes", tag = "3")]
    pub mac: Bytes,
}

impl Frame {
    /// The content of the frame, checked against its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is unknown or out of bounds.
    pub fn checked(self) -> Result<FrameKind, Malformed> {
        let kind = self.kind.ok_or(Malformed("an empty frame"))?;
        match &kind {
            FrameKind::Hello(hello) => hello.check()?,
            FrameKind::Challenge(challenge) => challenge.check()?,
            FrameKind::Proof(Proof { proof }) => tag(proof, "a proof of the wrong length")?,
            FrameKind::Refusal(refusal) => refusal.check()?,
            FrameKind::Authenticated(signed) => tag(&signed.mac, "a MAC of the wrong length")?,
        }
        Ok(kind)
    }
}

impl From<FrameKind> for Frame {
    fn from(kind: FrameKind) -> Self {
        Self { kind: Some(kind) }
    }
}
