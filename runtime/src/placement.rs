//! Where a rank's part of a model lies.

use std::fmt;

/// Where a rank's part of a model lies and is computed on: parameters, partials, the optimizer's state. Ranks have the same kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placement {
    /// In the memory of the process, on its processors.
    #[default]
    Host,
    /// On a CUDA device. Several ranks may use one.
    #[cfg(feature = "cuda")]
    Cuda {
        /// Which of the driver's devices.
        ordinal: usize,
    },
}

/// Its kind: which device a rank has is its own affair.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Host => "host",
            #[cfg(feature = "cuda")]
            Self::Cuda { .. } => "cuda",
        })
    }
}
