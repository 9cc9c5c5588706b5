//! Records as text: JSON with a version, in which operations, dtypes and the like go by their names.
//!
//! A text comes from a file that anybody may have written: whatever is in it, reading gives a record whose numbers fit
//! together, or an error.

use serde::{Deserialize, Serialize};

use crate::{FlightGroup, FlightRecord};

/// The version of the text. It goes up when a reader of the former version would misunderstand it.
const VERSION: u64 = 1;

/// Longer texts are refused: many times the text of the largest ring.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// Records of larger worlds are refused: an explanation takes memory for each rank.
const MAX_SIZE: usize = 1 << 20;

/// The reason why a text or a file cannot be read as a flight record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlightError {
    /// It is not JSON, or a field is missing or invalid.
    #[error("not a flight record: {problem}")]
    Malformed {
        /// The problem, and where it is.
        problem: String,
    },
    /// It was written by another version of this library.
    #[error("a flight record of version {found}; this library reads version {known}")]
    Version {
        /// Its version.
        found: u64,
        /// The one that can be read.
        known: u64,
    },
    /// It is too long to be read.
    #[error("a flight record of {bytes} bytes; at most {limit} are read")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The largest length.
        limit: u64,
    },
    /// The file could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
}

#[derive(Serialize)]
struct Written<'a> {
    version: u64,
    #[serde(flatten)]
    record: &'a FlightRecord,
}

#[derive(Deserialize)]
struct Version {
    version: u64,
}

impl FlightRecord {
    /// The record as JSON, with a version.
    ///
    /// # Panics
    /// Never: JSON can represent every record.
    #[must_use]
    pub fn to_json(&self) -> String {
        let written = Written { version: VERSION, record: self };
        serde_json::to_string(&written).expect("numbers, names and lists")
    }

    /// Reads a record that [`to_json`](Self::to_json) has written.
    ///
    /// # Errors
    /// [`FlightError::TooLong`], [`FlightError::Version`], or [`FlightError::Malformed`] with line and column, or with
    /// the numbers that do not fit together.
    pub fn from_json(text: &str) -> Result<Self, FlightError> {
        check_length(text.len() as u64)?;
        let Version { version } = parsed(text)?;
        if version != VERSION {
            return Err(FlightError::Version { found: version, known: VERSION });
        }
        let record: Self = parsed(text)?;
        record.check().map_err(|problem| FlightError::Malformed { problem })?;
        Ok(record)
    }

    /// Whether its numbers fit together; if not, the reason.
    fn check(&self) -> Result<(), String> {
        let Self { rank, size, .. } = *self;
        if size > MAX_SIZE {
            return Err(format!("a world of {size} ranks; at most {MAX_SIZE} are read"));
        }
        if rank.index() >= size {
            return Err(format!("rank {rank} of a world of {size}"));
        }
        for FlightGroup { id, ranks, .. } in &self.groups {
            if let Some(member) = ranks.iter().find(|member| member.index() >= size) {
                return Err(format!("group {id} has rank {member} of a world of {size}"));
            }
        }
        let mut numbers = self.entries.iter().map(|entry| entry.number).zip(self.overwritten..);
        match numbers.find(|(number, expected)| number != expected) {
            Some((number, expected)) => {
                Err(format!("entry {number} stands where {expected} belongs"))
            }
            None => Ok(()),
        }
    }
}

/// Refuses texts of more than the most bytes.
pub(crate) fn check_length(bytes: u64) -> Result<(), FlightError> {
    match MAX_BYTES {
        limit if bytes > limit => Err(FlightError::TooLong { bytes, limit }),
        _ => Ok(()),
    }
}

fn parsed<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, FlightError> {
    let malformed =
        |error: serde_json::Error| FlightError::Malformed { problem: error.to_string() };
    serde_json::from_str(text).map_err(malformed)
}
