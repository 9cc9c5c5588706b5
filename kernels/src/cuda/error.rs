//! The errors of devices.

use thiserror::Error;

/// The reason why an operation on a device failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// This build has no devices.
    #[error("this build does not have the feature `cuda`")]
    NotBuilt,
    /// A library of the system cannot be loaded, or lacks a function.
    #[error("{library} cannot be loaded ({purpose}): tried {}", tried.join(", "))]
    MissingLibrary {
        /// The name of the library: "libcuda", "libnvrtc" or "libcublas".
        library: &'static str,
        /// The purpose of the library, and the package that contains it.
        purpose: &'static str,
        /// The file names that were tried, each with the error of the loader.
        tried: Vec<String>,
    },
    /// The driver has no device of this ordinal.
    #[error("there is no CUDA device {ordinal}: the driver has {count}")]
    NoDevice {
        /// The requested ordinal, from 0.
        ordinal: usize,
        /// The number of devices.
        count: usize,
    },
    /// The kernels do not compile for the device.
    #[error("the kernels do not compile for {architecture}: {log}")]
    Compile {
        /// The architecture for which they were compiled, such as `compute_90`.
        architecture: String,
        /// The log of the compiler.
        log: String,
    },
    /// A call of the driver failed.
    #[error("{operation} on CUDA device {device}: the driver returned status {code}, {meaning}")]
    Driver {
        /// The operation that made the call.
        operation: String,
        /// The ordinal of the device.
        device: usize,
        /// The number of the driver's status.
        code: u32,
        /// The driver's name and description of the status.
        meaning: String,
    },
    /// A call of another library failed.
    #[error("{operation} on CUDA device {device}: {library} returned status {code}, {meaning}")]
    Library {
        /// The name of the library, such as "cuBLAS".
        library: &'static str,
        /// The operation that made the call.
        operation: String,
        /// The ordinal of the device.
        device: usize,
        /// The number of the library's status.
        code: i32,
        /// The library's name of the status.
        meaning: String,
    },
    /// The device has no memory left, even after the pool has freed its spare blocks.
    #[error(
        "CUDA device {device} is out of memory: cannot allocate {} for {what}, {free} of {total} bytes are free", size(*bytes)
    )]
    OutOfMemory {
        /// The ordinal of the device.
        device: usize,
        /// The size of the allocation in bytes; 0 if another library allocates, and does not tell
        /// it.
        bytes: usize,
        /// The purpose of the allocation.
        what: String,
        /// The bytes that are free, perhaps in smaller pieces.
        free: usize,
        /// The bytes that the device has, or the limit of
        /// [`Device::limit_memory`](super::Device::limit_memory).
        total: usize,
    },
    /// An operation was not done in time.
    #[error("{operation} on CUDA device {device} was not done in {waited_ms} ms")]
    Late {
        /// The operation.
        operation: String,
        /// The ordinal of the device.
        device: usize,
        /// The time for which the host has waited, in milliseconds.
        waited_ms: u128,
    },
    /// Buffers do not fit each other or the call.
    #[error("{operation}: {problem}")]
    Mismatch {
        /// The operation.
        operation: &'static str,
        /// The mismatch, with its numbers.
        problem: String,
    },
}

fn size(bytes: usize) -> String {
    if bytes == 0 { "memory".to_owned() } else { format!("{bytes} bytes") }
}
