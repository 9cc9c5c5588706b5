//! Compares the memory that a program will need with its limit, before the program allocates it.

use bytesize::ByteSize;

mod limit;

pub use self::limit::Limit;

/// Memory that a program will need, in parts. A sum beyond `u64::MAX` counts as `u64::MAX`.
#[derive(Clone, Debug, Default)]
pub struct Need {
    parts: Vec<(String, u64)>,
}

/// A program would need more memory than its process may have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "about {} of memory are needed, {} of them for {part}; {reason} {}",
    Shown(*.needed), Shown(*.of_part), Shown(*.limit)
)]
pub struct TooMuch {
    /// Bytes needed in total.
    pub needed: u64,
    /// Name of the part that needs the most.
    pub part: String,
    /// Bytes needed for that part.
    pub of_part: u64,
    /// Bytes that the process may have.
    pub limit: u64,
    /// Origin of the limit, as words that precede the number.
    pub reason: &'static str,
}

impl Need {
    /// Adds a part.
    #[must_use]
    pub fn with(mut self, part: impl Into<String>, bytes: u64) -> Self {
        self.parts.push((part.into(), bytes));
        self
    }

    /// Returns the sum of all parts.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Compares the sum with a limit.
    ///
    /// # Errors
    /// [`TooMuch`], which names the largest part.
    pub fn check(&self, limit: Limit) -> Result<(), TooMuch> {
        let needed = self.bytes();
        match self.parts.iter().max_by_key(|(_, bytes)| bytes) {
            Some((part, bytes)) if needed > limit.bytes => {
                let Limit { bytes: limit, reason } = limit;
                Err(TooMuch { needed, part: part.clone(), of_part: *bytes, limit, reason })
            }
            _ => Ok(()),
        }
    }
}

/// Multiplies sizes. Returns `u64::MAX` on overflow.
#[must_use]
pub fn product(sizes: &[usize]) -> u64 {
    sizes.iter().fold(1, |product, size| product.saturating_mul(*size as u64))
}

/// Shows a number of bytes with a binary unit.
struct Shown(u64);

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", ByteSize::b(self.0).display().iec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Limit = Limit { bytes: 1 << 30, reason: "this machine has" };

    #[test]
    fn the_largest_part_is_named() {
        let need = Need::default().with("a table", 1 << 31).with("a row", 1 << 11);
        let said = need.check(SMALL).expect_err("2 GiB").to_string();
        let expected = "about 2.0 GiB of memory are needed, 2.0 GiB of them for a table; \
                        this machine has 1.0 GiB";
        assert_eq!(said, expected);
        assert_eq!(Need::default().with("a row", 1 << 30).check(SMALL), Ok(()));
    }

    #[test]
    fn nothing_wraps_around() {
        let most = usize::MAX;
        assert_eq!([product(&[most, most, most]), product(&[0, most])], [u64::MAX, 0]);
        let need = Need::default().with("a cube", u64::MAX).with("a row", 1);
        assert_eq!(need.bytes(), u64::MAX);
        assert!(need.check(SMALL).is_err());
    }

    #[test]
    fn a_process_may_have_some_memory() {
        assert!(Limit::of_process().bytes > 1 << 20);
    }
}
