//! Measured times of all-reduces.

use serde::Deserialize;

use super::table;
use crate::{Error, Time};

/// An all-reduce that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllReduceRow {
    /// Its members, each with a card of its own.
    pub members: usize,
    /// The bytes of a member's buffer.
    pub bytes: u64,
}

impl AllReduceRow {
    /// The numbers of a machine with cards that are fitted to such rows.
    pub const NUMBERS: [&str; 2] = ["calls.start", "links.machine.efficiency"];
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    gpus: u64,
    bytes: u64,
    us: f64,
}

const MOST_MEMBERS: u64 = 1_000_000;
const MOST_BYTES: u64 = 1 << 50;

/// Reads a CSV with the columns `gpus, bytes, us`.
///
/// # Errors
/// [`Error::Table`], with the line, if a column is missing, unknown or no number, if a number is out of its range, or if there are no rows or more
/// than 100,000.
pub fn read_all_reduces(text: &str) -> Result<Vec<(AllReduceRow, Time)>, Error> {
    table::read(text, |Raw { gpus, bytes, us }| {
        let members = table::count(gpus, MOST_MEMBERS, "gpus")?;
        table::count(bytes, MOST_BYTES, "bytes")?;
        Ok((AllReduceRow { members, bytes }, table::time(us, 1e-6, "us")?))
    })
}
