//! Reads the flight records of a world from files and folders.

use std::fs;
use std::path::{Path, PathBuf};

use hsdp_comm::FlightRecord;
use hsdp_train::file::{self, FileError};

/// Maximum number of bytes in a record, and in all records together. A record of 1,024 entries has
/// some 300 KB.
const MAX_RECORD: u64 = 64 << 20;
const MAX_BYTES: u64 = 1 << 30;

/// Reads records from the files themselves, and from folders all files with the name of a record.
pub(crate) fn read(dumps: &[PathBuf]) -> Result<Vec<FlightRecord>, String> {
    let (mut records, mut left) = (Vec::new(), MAX_BYTES);
    for dump in dumps {
        for file in files(dump)? {
            records.push(read_one(&file, &mut left)?);
        }
    }
    Ok(records)
}

/// Returns the file itself, or the records of a folder, in order of rank.
fn files(dump: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", dump.display());
    if !fs::metadata(dump).map_err(failed)?.is_dir() {
        return Ok(vec![dump.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(dump).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if let Some(rank) = rank(&path) {
            files.push((rank, path));
        }
    }
    files.sort();
    match files.is_empty() {
        true => Err(format!("{}: there is no rank-N.json in this folder", dump.display())),
        false => Ok(files.into_iter().map(|(_, path)| path).collect()),
    }
}

/// Returns the rank in a name such as `rank-12.json`.
pub(crate) fn rank(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix("rank-")?.strip_suffix(".json")?.parse().ok()
}

/// Reads a record of at most `left` bytes, and subtracts its bytes from `left`.
fn read_one(file: &Path, left: &mut u64) -> Result<FlightRecord, String> {
    let text = file::read_text(file, MAX_RECORD.min(*left)).map_err(|error| match error {
        FileError::TooLong { .. } if *left < MAX_RECORD => {
            format!("{error}: all records together have at most {MAX_BYTES}")
        }
        error => error.to_string(),
    })?;
    *left -= text.len() as u64;
    FlightRecord::from_json(&text).map_err(|error| format!("{}: {error}", file.display()))
}
