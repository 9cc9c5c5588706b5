//! The format of the messages, and the gRPC method that carries them. Public for tests and fuzzers
//! only.
//!
//! All received bytes go through `Frame::checked` or `WireMessage::read`, which check every string,
//! message and number against its bound, independently of any other state.

mod attend;
mod frame;
mod handshake;
mod message;

pub use self::attend::{Replies, answer, call};
pub use self::frame::{Authenticated, Frame, FrameKind};
pub use self::handshake::{Challenge, Hello, Proof, Refusal};
pub use self::message::{Body, FromCoordinator, FromMember, WireMessage};

use crate::limits::MOST_STRING;

/// The version of the protocol. Another version may differ in all but the frames of the handshake.
pub const PROTOCOL: u32 = 4;

/// Bytes of a nonce, a proof and a MAC.
pub const TAG: usize = 32;

/// Received bytes that are not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {0}")]
pub struct Malformed(pub(crate) &'static str);

fn tag(bytes: &[u8], what: &'static str) -> Result<(), Malformed> {
    if bytes.len() == TAG { Ok(()) } else { Err(Malformed(what)) }
}

fn string(text: &str, what: &'static str) -> Result<(), Malformed> {
    if text.len() <= MOST_STRING { Ok(()) } else { Err(Malformed(what)) }
}
