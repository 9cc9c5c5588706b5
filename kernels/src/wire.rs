//! The dtype in which collectives move gradients.

use std::fmt;

use half::{bf16, f16};
use hsdp_sharding::DType;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The dtype in which a collective moves gradients.
///
/// A contribution is rounded to this dtype once, to nearest with ties to even. Sums are f32 on
/// every wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// f32: nothing is rounded.
    #[default]
    F32,
    /// f16: 11 bits of precision, values up to 65504.
    F16,
    /// bf16: 8 bits of precision, the range of f32.
    BF16,
}

impl Wire {
    /// The wire as a [`DType`].
    pub const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }

    /// Rounds `value` to this dtype and converts it back to f32, which is exact.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::BF16 => bf16::from_f32(value).to_f32(),
        }
    }
}

impl TryFrom<DType> for Wire {
    type Error = Error;

    /// # Errors
    ///
    /// [`Error::NotReal`] if `dtype` is not f32, f16 or bf16.
    fn try_from(dtype: DType) -> Result<Self, Error> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::F16 => Ok(Self::F16),
            DType::BF16 => Ok(Self::BF16),
            dtype => Err(Error::NotReal { dtype }),
        }
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dtype().fmt(formatter)
    }
}
