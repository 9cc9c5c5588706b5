//! The driver of a build without the feature `cuda`: no context can be made, so no device, stream or buffer of a device either. The
//! compiler checks the code that uses them, and leaves it out.

use std::ffi::c_void;

use super::device::{Architecture, Shared};
use super::error::CudaError;
use super::stream::Operation;

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
pub(super) enum Context {}

/// A kernel that is loaded on a device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Loaded {}

impl Loaded {
    pub(super) fn resident(&self) -> u32 {
        match *self {}
    }
}

impl Context {
    pub(super) fn count() -> Result<usize, CudaError> {
        Err(CudaError::NotBuilt)
    }

    pub(super) fn open(_: usize, _: Shared) -> Result<Self, CudaError> {
        Err(CudaError::NotBuilt)
    }

    pub(super) fn ordinal(&self) -> usize {
        match *self {}
    }

    pub(super) fn architecture(&self) -> Architecture {
        match *self {}
    }

    pub(super) fn shared(&self) -> &Shared {
        match *self {}
    }

    pub(super) fn make_current(&self) -> Result<(), CudaError> {
        match *self {}
    }

    pub(super) fn load<const N: usize>(
        &self,
        _: String,
        _: [&'static str; N],
    ) -> Result<[Loaded; N], CudaError> {
        match *self {}
    }

    pub(super) fn stream(&self) -> Result<CUstream, CudaError> {
        match *self {}
    }

    pub(super) unsafe fn destroy(&self, _: CUstream) -> Result<(), CudaError> {
        match *self {}
    }

    pub(super) fn event(&self) -> Result<CUevent, CudaError> {
        match *self {}
    }

    pub(super) unsafe fn record(&self, _: CUevent, _: CUstream) -> Result<(), CudaError> {
        match *self {}
    }

    pub(super) unsafe fn wait_on(&self, _: CUstream, _: CUevent) -> Result<(), CudaError> {
        match *self {}
    }

    pub(super) unsafe fn has_reached(&self, _: CUevent) -> Result<bool, CudaError> {
        match *self {}
    }

    pub(super) unsafe fn allocate(&self, _: usize) -> Result<Option<u64>, CudaError> {
        match *self {}
    }

    pub(super) unsafe fn free(&self, _: u64) -> Result<(), CudaError> {
        match *self {}
    }

    pub(super) fn memory(&self) -> (usize, usize) {
        match *self {}
    }

    pub(super) fn lock_pages(&self, _: usize) -> Result<*mut u8, CudaError> {
        match *self {}
    }

    pub(super) unsafe fn issue(&self, _: CUstream, _: Operation<'_>) -> Result<(), CudaError> {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::{CudaError, Device, DeviceBuffer, Stream, compile};

    #[test]
    fn nothing_of_a_device_has_values_so_a_test_for_one_costs_nothing() {
        assert_eq!(Device::new(0).err(), Some(CudaError::NotBuilt));
        assert_eq!(Device::count(), Err(CudaError::NotBuilt));
        assert_eq!(compile(super::Architecture(90)), Err(CudaError::NotBuilt));
        let sizes = [size_of::<Option<Device>>(), size_of::<Option<Stream>>()];
        assert_eq!((sizes, size_of::<Option<DeviceBuffer>>()), ([0, 0], 0));
    }
}
