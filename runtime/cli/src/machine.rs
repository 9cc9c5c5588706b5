//! Machines: bundled ones, and those in files (MACHINES.md).

use std::path::Path;

use hsdp_program::file::{self, FileError};
use hsdp_simulator::Machine;

/// The most bytes of a machine file.
const MAX_BYTES: u64 = 1 << 20;

/// The bundled machine of this name, or the machine in the file of this name.
///
/// # Errors
/// In one line, if there is none, or its numbers are impossible.
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
