//! The errors of this crate's host functions.

use hsdp_sharding::DType;
use thiserror::Error;

/// The reason why a value could not be made or an operation failed. The operation has written
/// nothing.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Parameters and gradients cannot have this dtype.
    #[error("{dtype} is not a dtype of parameters or gradients: expected f32, f16 or bf16")]
    NotReal {
        /// The dtype, as given.
        dtype: DType,
    },
    /// A buffer could not be allocated. This is the only variant that is not a mistake of the
    /// caller.
    #[error("out of memory: cannot allocate {bytes} bytes")]
    OutOfMemory {
        /// The size of the buffer in bytes.
        bytes: usize,
    },
    /// A divisor is zero, negative, infinite or NaN.
    #[error("divisor {value} is invalid: a divisor must be finite and greater than zero")]
    Divisor {
        /// The value, as given.
        value: f32,
    },
    /// An average of integers was requested. It would need a rounding, which no argument specifies.
    #[error(
        "average of {sources} sources in {dtype}: only floating-point elements have an average"
    )]
    IntegerAverage {
        /// The dtype of the elements.
        dtype: DType,
        /// The number of sources.
        sources: usize,
    },
}
