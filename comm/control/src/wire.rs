//! The format of the messages, and the gRPC method that carries them. Public for tests and fuzzers only.
//!
//! All received bytes go through `Frame::checked`, `MemberLetter::read` or `CoordinatorLetter::read`, which
//! check every string, value and number against its bound, independently of any other state.

mod attend;
mod failure;
mod frame;
mod handshake;
mod letter;

pub use self::attend::{Attend, Control, Replies, call};
pub use self::failure::{
    Absence, Difference, Failure, Givers, Grounds, Incompleteness, Lateness, Mixture, Occupied,
    Overflow,
};
pub use self::frame::{Frame, Kind, Sealed};
pub use self::handshake::{Challenge, Hello, Proof, Refusal};
pub use self::letter::{
    Abort, Aborted, Changed, CoordinatorLetter, Ended, FromCoordinator, FromMember, Give, Loss,
    MemberLetter, Pass, Present, Quit, RoundFailed, RoundKind, Standing, Value, Welcome,
};

use crate::limits::{MOST_STRING, MOST_VALUE};

/// The version of the protocol. Another version may differ in all but the frames of the handshake.
pub const PROTOCOL: u32 = 2;

/// Bytes of a nonce, a proof and a MAC.
pub const TAG: usize = 32;

/// Received bytes that are not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {0}")]
pub struct Malformed(pub(crate) &'static str);

pub(crate) fn tag(bytes: &[u8], what: &'static str) -> Result<(), Malformed> {
    if bytes.len() == TAG { Ok(()) } else { Err(Malformed(what)) }
}

pub(crate) fn string(text: &str, what: &'static str) -> Result<(), Malformed> {
    if text.len() <= MOST_STRING { Ok(()) } else { Err(Malformed(what)) }
}

pub(crate) fn value(bytes: &[u8]) -> Result<(), Malformed> {
    if bytes.len() <= MOST_VALUE { Ok(()) } else { Err(Malformed("a value of more than 64 KiB")) }
}
