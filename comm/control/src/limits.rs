//! Limits on sizes and numbers.

use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// Bytes of a message to another member, at most.
pub const MOST_MESSAGE: usize = 64 << 10;

/// Ranks of a world, at most.
pub const MOST_RANKS: u32 = 4096;

/// Bytes of a frame: a message with its header, its MAC and the encoding of protobuf.
pub(crate) const MOST_FRAME: usize = 66 << 10;

/// Receivers of a message in one frame. Each takes at most 7 bytes, 2 for its rank (below `MOST_RANKS`) and 5 for its number:
/// 1792 of the 2048 bytes that a frame has besides the longest message. MAC, lengths and tags take 50 at most.
pub(crate) const MOST_RECEIVERS: usize = 256;

/// Bytes of a string.
pub(crate) const MOST_STRING: usize = 256;

/// The time between two pings of HTTP/2, and the time limit for an answer.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Connections at one time that have not authenticated yet.
pub(crate) fn most_unauthenticated(world: u32) -> usize {
    2 * world as usize + 4
}

/// Frames that wait until one member reads them.
pub(crate) fn most_waiting(world: u32) -> usize {
    7 * world as usize + 1024
}

/// Messages that one member may have on the way to another. Those of all members together take at most 3 x world + 1024
/// of the frames that may wait.
pub(crate) fn most_passed(world: u32) -> usize {
    3 + 1024 / world as usize
}

/// The beginning of a text, as long as a string may be.
pub(crate) fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MOST_STRING)].to_owned()
}

/// Decodes a text, and refuses one that is too long.
pub(crate) fn short<'a, T, D>(from: D) -> Result<T, D::Error>
where
    T: Deserialize<'a> + AsRef<str>,
    D: Deserializer<'a>,
{
    let text = T::deserialize(from)?;
    let is_short = text.as_ref().len() <= MOST_STRING;
    is_short.then_some(text).ok_or_else(|| D::Error::custom("a text that is too long"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        assert_eq!(cut("short"), "short");
        let long = "é".repeat(200);
        assert_eq!(cut(&long).len(), 256);
        let odd = format!("x{long}");
        assert_eq!(cut(&odd).len(), 255);
    }
}
