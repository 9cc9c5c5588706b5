//! The driver of a build without the feature `cuda`: no context can be made, so no device, stream
//! or buffer of a device either. The compiler checks the code that uses them, and leaves it out.

use std::ffi::c_void;

use super::device::{Architecture, OfDevice};
use super::error::CudaError;
use super::product::Gemm;
use super::stream::DriverCall;

pub(super) type CUstream = *mut c_void;
pub(super) type CUevent = *mut c_void;

/// Whether this build has devices: whether it has the feature `cuda`.
pub const HAS_DEVICES: bool = false;

/// Compiles all kernels to PTX, which this build cannot.
///
/// # Errors
/// [`CudaError::NotBuilt`].
pub fn compile(_: Architecture) -> Result<String, CudaError> {
    Err(CudaError::NotBuilt)
}

/// A device that is open: there is none.
#[derive(Clone, Copy)]
pub(super) enum OpenDevice {}

/// A kernel that is loaded on a device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Loaded {}

/// cuBLAS on a device: there is none.
#[derive(Debug)]
pub(super) enum Blas {}

/// The methods of the driver that is there, which no value can call.
macro_rules! methods {
    (unsafe: $($name:ident($($of:ty),*) -> $output:ty;)*) => {
        $(
            pub(super) unsafe fn $name(&self $(, _: $of)*) -> $output {
                match *self {}
            }
        )*
    };
    ($($name:ident($($of:ty),*) -> $output:ty;)*) => {
        $(
            pub(super) fn $name(&self $(, _: $of)*) -> $output {
                match *self {}
            }
        )*
    };
}

impl Loaded {
    methods! {
        resident() -> u32;
    }
}

impl Blas {
    methods! { unsafe:
        multiply(CUstream, &Gemm) -> Result<(), CudaError>;
    }
}

impl OpenDevice {
    pub(super) fn count() -> Result<usize, CudaError> {
        Err(CudaError::NotBuilt)
    }

    pub(super) fn open(_: usize, _: OfDevice) -> Result<Self, CudaError> {
        Err(CudaError::NotBuilt)
    }

    methods! {
        ordinal() -> usize;
        architecture() -> Architecture;
        shared() -> &OfDevice;
        make_current() -> Result<(), CudaError>;
        load(&[&'static str]) -> Result<Vec<Loaded>, CudaError>;
        stream() -> Result<CUstream, CudaError>;
        event() -> Result<CUevent, CudaError>;
        memory() -> (usize, usize);
        lock_pages(usize) -> Result<*mut u8, CudaError>;
        blas() -> Result<Blas, CudaError>;
    }

    methods! { unsafe:
        destroy(CUstream) -> Result<(), CudaError>;
        record(CUevent, CUstream) -> Result<(), CudaError>;
        wait_on(CUstream, CUevent) -> Result<(), CudaError>;
        has_reached(CUevent) -> Result<bool, CudaError>;
        allocate(usize) -> Result<Option<u64>, CudaError>;
        free(u64) -> Result<(), CudaError>;
        issue(CUstream, DriverCall<'_>) -> Result<(), CudaError>;
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::{Architecture, CudaError, Device, compile};

    #[test]
    fn a_device_is_refused_and_has_no_values_so_a_test_for_one_costs_nothing() {
        assert_eq!(Device::new(0).err(), Some(CudaError::NotBuilt));
        assert_eq!(Device::count(), Err(CudaError::NotBuilt));
        assert_eq!(compile(Architecture(90)), Err(CudaError::NotBuilt));
        assert_eq!(size_of::<Option<Device>>(), 0);
    }
}
