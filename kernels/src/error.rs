//! What this crate refuses.

use hsdp_sharding::DType;
use thiserror::Error;

/// Why a value could not be made or an operation not be done. Nothing was written.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// A dtype that gradients and parameters never have was asked for as one.
    #[error("{dtype} is no dtype of parameters or gradients: it is neither f32, f16 nor bf16")]
    NotReal {
        /// What was asked for.
        dtype: DType,
    },
    /// There is no memory for a buffer. The only one that is no mistake of the caller.
    #[error("out of memory: no {bytes} bytes to be had")]
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
    },
    /// A divisor that would turn gradients into infinities, NaN, or their negatives.
    #[error("divisor {value}: a divisor is finite and greater than zero")]
    Divisor {
        /// What was asked for.
        value: f32,
    },
    /// An average of integers, which would have to be rounded in a way that nobody named.
    #[error(
        "average of {sources} sources in {dtype}: only floating-point elements have an average"
    )]
    IntegerAverage {
        /// The dtype of the elements.
        dtype: DType,
        /// How many sources there were.
        sources: usize,
    },
}
