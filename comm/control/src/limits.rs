//! Limits on sizes and numbers.

use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::ControlError;

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

/// The open files of a coordinator besides one for each member: the three standard streams, files of the program, the
/// runtimes, and this process's own member.
const FILES_BESIDES: u64 = 32;

/// Refuses a world if this process may not open a connection to each of its members: they would be refused one after the
/// other.
pub(crate) fn check_open_files(world: u32) -> Result<(), ControlError> {
    // Without a limit there is nothing to check.
    getrlimit(Resource::Nofile).current.map_or(Ok(()), |most| enough(world, most))
}

fn enough(world: u32, most: u64) -> Result<(), ControlError> {
    let needed = u64::from(world) + FILES_BESIDES;
    if needed <= most { Ok(()) } else { Err(ControlError::Descriptors { world, needed, most }) }
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

    #[test]
    fn a_world_needs_a_file_for_each_rank() {
        assert_eq!(enough(64, 96), Ok(()));
        let said = enough(64, 95).expect_err("one is missing").to_string();
        let expected = "a world of 64 ranks: its coordinator needs 96 open files, this process may have 95 (ulimit -n)";
        assert_eq!(said, expected);
    }
}
