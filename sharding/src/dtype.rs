//! Element types, by name and size.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The type of a buffer's elements.
///
/// Displayed as `f32`, `f16`, `bf16`, `f64`, `i32`, `i64`, `u32`, `u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16: 11 significant bits, largest value 65504.
    F16,
    /// bfloat16: 8 significant bits, the range of f32.
    BF16,
    /// IEEE 754 binary64.
    F64,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit unsigned integer.
    U64,
}

impl DType {
    /// Every dtype.
    pub const ALL: [Self; 8] =
        [Self::F32, Self::F16, Self::BF16, Self::F64, Self::I32, Self::I64, Self::U32, Self::U64];

    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// Whether its elements are floating-point numbers: true for f32, f16, bf16 and f64.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16 | Self::F64)
    }

    /// Returns whether parameters and gradients in training can have this dtype: f32, bf16 or f16.
    #[must_use]
    pub const fn is_of_training(self) -> bool {
        matches!(self, Self::F32 | Self::BF16 | Self::F16)
    }

    /// Its name: `f32`, `bf16` and so on, as it is displayed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F64 => "f64",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U32 => "u32",
            Self::U64 => "u64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_size_and_kind() {
        for dtype in DType::ALL {
            let bits: usize = dtype.name().trim_start_matches(char::is_alphabetic).parse().unwrap();
            assert_eq!(dtype.size_bytes() * 8, bits);
            assert_eq!(dtype.is_float(), dtype.name().contains('f'));
        }
    }
}
