//! What can go wrong with a device.

use thiserror::Error;

/// Why a device could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library of the system is missing.
    #[error("{library} cannot be loaded ({purpose}): tried {}", tried.join(", "))]
    MissingLibrary {
        /// Which one.
        library: &'static str,
        /// What it is for.
        purpose: &'static str,
        /// The names that were tried, each with the reason of the loader.
        tried: Vec<String>,
    },
    /// There is no such device.
    #[error("there is no CUDA device {ordinal}: the driver has {count}")]
    NoDevice {
        /// Which one was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The kernels do not compile for the device.
    #[error("the kernels do not compile for {architecture}: {log}")]
    Compile {
        /// For which architecture.
        architecture: String,
        /// What the compiler says.
        log: String,
    },
    /// The driver refuses a call.
    #[error("{operation} on CUDA device {device}: the driver says {code}, {meaning}")]
    Driver {
        /// What was asked of it.
        operation: String,
        /// The ordinal of the device.
        device: usize,
        /// The number of the status.
        code: u32,
        /// What the driver says that it means.
        meaning: String,
    },
    /// The device has no memory left, though nothing waits in the pool any more.
    #[error(
        "CUDA device {device} is out of memory: no {bytes} bytes to be had for {what}, {free} of {total} are free"
    )]
    OutOfMemory {
        /// The ordinal of the device.
        device: usize,
        /// How much was asked for.
        bytes: usize,
        /// What for.
        what: String,
        /// Bytes that are free, in smaller pieces.
        free: usize,
        /// Bytes that the device has.
        total: usize,
    },
    /// What was issued was not done in time.
    #[error("{operation} on CUDA device {device} was not done in {waited_ms} ms")]
    Late {
        /// What was waited for.
        operation: String,
        /// The ordinal of the device.
        device: usize,
        /// For how long it was waited, in milliseconds.
        waited_ms: u128,
    },
    /// Buffers do not fit each other or the call.
    #[error("{operation}: {problem}")]
    Mismatch {
        /// What was asked for.
        operation: &'static str,
        /// What does not fit, with its numbers.
        problem: String,
    },
}
