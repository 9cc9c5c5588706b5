//! Counts with their unit in the type, so that elements and bytes cannot be added.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};

use crate::DType;

/// A number of elements, whatever their dtype. Displayed as `1003 elements`.
///
/// Arithmetic is checked: the operators panic instead of wrapping around, in every build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ElemCount(pub u64);

/// A number of bytes. Displayed with a binary unit: `512 B`, `1.50 KiB`, `2.00 GiB`.
///
/// Arithmetic is checked: the operators panic instead of wrapping around, in every build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteCount(pub u64);

impl ElemCount {
    /// The length of a slice as a count of its elements.
    #[must_use]
    pub const fn of(len: usize) -> Self {
        Self(len as u64)
    }

    /// The size in bytes of this many elements of `dtype`.
    ///
    /// # Panics
    /// If the number of bytes exceeds `u64::MAX`.
    #[must_use]
    pub fn bytes(self, dtype: DType) -> ByteCount {
        ByteCount::of(dtype.size_bytes()) * self.0
    }
}

impl ByteCount {
    /// The size of a buffer as a count of its bytes.
    #[must_use]
    pub const fn of(size: usize) -> Self {
        Self(size as u64)
    }
}

/// The same checked arithmetic for both counts.
macro_rules! checked_arithmetic {
    ($count:ident, $what:literal) => {
        impl $count {
            /// A count of 0.
            pub const ZERO: Self = Self(0);

            /// The bare number.
            #[must_use]
            pub const fn get(self) -> u64 {
                self.0
            }

            /// The product, or `None` where it exceeds `u64::MAX`.
            #[must_use]
            pub const fn checked_mul(self, factor: u64) -> Option<Self> {
                match self.0.checked_mul(factor) {
                    Some(product) => Some(Self(product)),
                    None => None,
                }
            }
        }

        impl Add for $count {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                let sum = self.0.checked_add(other.0);
                Self(sum.expect(concat!("a count of ", $what, " exceeds u64::MAX")))
            }
        }

        impl AddAssign for $count {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        impl Sub for $count {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                let difference = self.0.checked_sub(other.0);
                Self(difference.expect(concat!("a count of ", $what, " falls below 0")))
            }
        }

        impl Mul<u64> for $count {
            type Output = Self;
            fn mul(self, factor: u64) -> Self {
                self.checked_mul(factor).expect(concat!("a count of ", $what, " exceeds u64::MAX"))
            }
        }

        impl Sum for $count {
            fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
                counts.fold(Self::ZERO, Add::add)
            }
        }
    };
}

checked_arithmetic!(ElemCount, "elements");
checked_arithmetic!(ByteCount, "bytes");

impl fmt::Display for ElemCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.pad("1 element"),
            n => f.pad(&format!("{n} elements")),
        }
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        // An f64 keeps more than the digits that are shown, so only the shown text is rounded.
        let power = self.0.ilog2() / 10;
        let scaled = self.0 as f64 / (1u64 << (10 * power)) as f64;
        f.pad(&format!("{scaled:.2} {}", UNITS[power as usize - 1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_show_their_unit() {
        assert_eq!(ElemCount(1).to_string(), "1 element");
        assert_eq!(ElemCount(1003).to_string(), "1003 elements");
        let shown = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (1 << 20, "1.00 MiB"),
            (5 << 30, "5.00 GiB"),
            (u64::MAX, "16.00 EiB"),
        ];
        for (bytes, text) in shown {
            assert_eq!(ByteCount(bytes).to_string(), text);
        }
    }

    #[test]
    fn elements_become_bytes_by_the_size_of_their_dtype() {
        for dtype in DType::ALL {
            assert_eq!(ElemCount(3).bytes(dtype), ByteCount::of(3 * dtype.size_bytes()));
        }
    }

    #[test]
    fn arithmetic_is_checked() {
        let small = ByteCount(1);
        let large = ByteCount(u64::MAX);
        assert_eq!([small, small].into_iter().sum::<ByteCount>(), small * 2);
        assert_eq!(large - small + small, large);
        assert_eq!(large.checked_mul(2), None);
    }

    #[test]
    #[should_panic(expected = "a count of bytes falls below 0")]
    fn a_difference_below_zero_panics() {
        let _ = ByteCount(1) - ByteCount(2);
    }

    #[test]
    #[should_panic(expected = "a count of bytes exceeds u64::MAX")]
    fn bytes_beyond_u64_panic() {
        let _ = ElemCount(u64::MAX).bytes(DType::F16);
    }
}
