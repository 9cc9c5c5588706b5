//! Sizes and times, as written on a command line and in a table.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub usize);

const UNITS: [(&str, usize); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size: write 8B, 64KiB, 16MiB or 1GiB");
        let unit = UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, bytes)));
        let (number, bytes) = unit.ok_or_else(wrong)?;
        let number: usize = number.trim().parse().map_err(|_| wrong())?;
        number.checked_mul(*bytes).filter(|bytes| *bytes > 0).map(Self).ok_or_else(wrong)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |(_, bytes): &&(&str, usize)| self.0.is_multiple_of(*bytes);
        let (name, bytes) = UNITS.iter().find(fits).unwrap_or(&("B", 1));
        f.pad(&format!("{} {name}", self.0 / bytes))
    }
}

/// Reads a time: `200us`, `5ms`, `1s`.
///
/// # Errors
/// A message if the text is not a time.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time: write 200us, 5ms or 1s");
    let units = [("us", 1_u64), ("ms", 1000), ("s", 1_000_000)];
    let unit = units.iter().find_map(|(name, micros)| Some((text.strip_suffix(name)?, micros)));
    let (number, micros) = unit.ok_or_else(wrong)?;
    let number: u64 = number.trim().parse().map_err(|_| wrong())?;
    number.checked_mul(*micros).map(Duration::from_micros).ok_or_else(wrong)
}
