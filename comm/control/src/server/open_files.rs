//! The limit on the open files of this process.

use rustix::process::{Resource, getrlimit};

use crate::{ControlError, ServerError};

/// The open files of a coordinator besides one for each member: the three standard streams, files
/// of the program, the runtimes, and this process's own member.
const FILES_BESIDES: u64 = 32;

/// Refuses a world if this process may not open a connection to each of its members: they would be
/// refused one after the other.
pub(super) fn check_open_files(world: u32) -> Result<(), ControlError> {
    // Without a limit there is nothing to check.
    getrlimit(Resource::Nofile).current.map_or(Ok(()), |most| enough(world, most))
}

fn enough(world: u32, most: u64) -> Result<(), ControlError> {
    let needed = u64::from(world) + FILES_BESIDES;
    if needed <= most {
        Ok(())
    } else {
        Err(ServerError::Descriptors { world, needed, most }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_world_needs_a_file_for_each_rank() {
        assert_eq!(enough(64, 96), Ok(()));
        let said = enough(64, 95).expect_err("one is missing").to_string();
        let expected = "a world of 64 ranks: its coordinator needs 96 open files, this process may have 95 (ulimit -n)";
        assert_eq!(said, expected);
    }
}
