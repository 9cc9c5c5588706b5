//! The messages, as they travel, and how they travel. Public for tests and fuzzers only.
//!
//! Whatever comes from outside goes through `Frame::checked`, `MemberLetter::read` or `CoordinatorLetter::read`, which
//! bound every string, value and number that has a bound without looking at anything else.

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
    Abort, Aborted, Changed, CoordinatorLetter, Ended, FromCoordinator, FromMember, Give,
    MemberLetter, Pass, Present, RoundFailed, RoundKind, Standing, Value, Welcome,
};

use crate::limits::{MOST_STRING, MOST_VALUE};

/// The version of the protocol: everything but the handshake's first frames may differ in another one.
pub const PROTOCOL: u32 = 1;

/// Bytes of a nonce, a proof and a seal.
pub const TAG: usize = 32;

/// Something that no side says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not understood: {0}")]
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
