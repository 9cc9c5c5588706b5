//! Limits on sizes and numbers.

/// Bytes of a value that is exchanged or broadcast, or of a message to another member, at most.
pub const MOST_VALUE: usize = 64 << 10;

/// Ranks of a world, at most.
pub const MOST_RANKS: u32 = 4096;

/// Bytes of a frame: a value with its key, its MAC and the encoding of protobuf.
pub(crate) const MOST_FRAME: usize = 66 << 10;

/// Bytes of a string.
pub(crate) const MOST_STRING: usize = 256;

/// Rounds that are in progress at one time.
pub(crate) const MOST_ROUNDS: usize = 256;

/// Connections at one time that have not authenticated yet.
pub(crate) fn most_strangers(world: u32) -> usize {
    2 * world as usize + 4
}

/// Frames that wait until one member reads them.
pub(crate) fn most_waiting(world: u32) -> usize {
    7 * world as usize + 1024
}

/// Messages that one member may have on the way to another. Those of all members together take at most 3 x world + 1024
/// of the frames that may wait.
pub(crate) fn most_passed(world: usize) -> usize {
    3 + 1024 / world.max(1)
}

/// The beginning of a text, as long as a string may be.
pub(crate) fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MOST_STRING)].to_owned()
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
