//! Machines: bundled ones, and those in files (MACHINES.md).

use std::path::Path;

use hsdp_sharding::ByteCount;
use hsdp_simulator::Machine;
use hsdp_train::file::{self, FileError};

/// Maximum number of bytes in a machine file.
const MAX_BYTES: u64 = 1 << 20;

/// Returns the bundled machine of this name, or the machine in the file of this name.
///
/// # Errors
/// A text of one line, if there is none, or its numbers are impossible.
pub(crate) fn find(name: &str) -> Result<Machine, String> {
    if Machine::BUNDLED.contains(&name) {
        return Machine::bundled(name).map_err(|error| error.to_string());
    }
    let text = file::read_text(Path::new(name), MAX_BYTES).map_err(|error| match error {
        FileError::Io { .. } => {
            format!("{error}; a machine is a file, or one of {}", Machine::BUNDLED.join(", "))
        }
        error => error.to_string(),
    })?;
    Machine::from_toml(&text).map_err(|error| format!("{name}: {error}"))
}

/// Returns the memory of a rank: its card's, or its part of the host's.
pub(crate) fn memory_of(machine: &Machine, ranks: usize) -> ByteCount {
    let sharing = if machine.device().is_some() { 1.0 } else { ranks as f64 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of memory")]
    let bytes = (machine.memory.capacity.value() / sharing) as u64;
    ByteCount(bytes)
}
