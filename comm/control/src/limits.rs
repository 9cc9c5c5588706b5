//! How much of anything there may be.

/// Bytes of a value that is exchanged or broadcast, at most.
pub const MOST_VALUE: usize = 64 << 10;

/// Ranks of a world, at most.
pub const MOST_RANKS: u32 = 4096;

/// Bytes of a frame: a value with its key, its seal and what protobuf puts around them.
pub(crate) const MOST_FRAME: usize = 66 << 10;

/// Bytes of a string.
pub(crate) const MOST_STRING: usize = 256;

/// Rounds that are open at one time.
pub(crate) const MOST_ROUNDS: usize = 256;

/// Connections at one time of which nobody knows yet whose they are.
pub(crate) fn most_strangers(world: u32) -> usize {
    2 * world as usize + 4
}

/// Frames that wait until one member takes them.
pub(crate) fn most_waiting(world: u32) -> usize {
    7 * world as usize + 1024
}

/// What one member may have on its way to another: all together they fill no more than 3 x world + 1024 places of those that wait.
pub(crate) fn most_passed(world: usize) -> usize {
    3 + 1024 / world.max(1)
}

/// As much of the beginning of a text as a string may have.
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
