//! Memory and streams that another library owns. `CUDA.md`, "Memory of other libraries".

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::memory::Uses;
use super::stream::Stream;

/// The value that keeps foreign memory alive. It is dropped when the library may use the memory again.
type Owner = Box<dyn Any + Send + Sync>;

/// A piece of device memory that another library owns.
pub(super) struct Foreign {
    pub(super) address: u64,
    pub(super) uses: Uses,
    /// The stream on which the library uses and frees the memory.
    stream: Arc<Stream>,
    /// `Some` until the memory is given back.
    owner: Option<Owner>,
}

impl Foreign {
    /// Makes the library's stream wait for all operations on the memory, and gives the memory back.
    pub(super) fn give_back(mut self) {
        let owner = self.owner.take();
        if let Err(error) = self.stream.wait_for(&self.uses) {
            // It is unknown when the device is done with the memory, so the library never gets it back.
            hsdp_warnings::warn!(%error, "device memory of another library cannot be given back: it is leaked");
            let _ = ManuallyDrop::new(owner);
        }
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foreign").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl DeviceBuffer {
    /// Makes a buffer of `len` elements of `dtype` in device memory that another library owns and uses on `stream`. Operations that the
    /// library has issued on `stream` so far run before all operations on the buffer. Operations that it issues after the buffer is
    /// dropped run after them. `owner` keeps the memory alive, and is dropped with the buffer.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the dtype is not f32, f16 or bf16; [`CudaError::Driver`] if a call of the driver fails.
    ///
    /// # Safety
    /// CU-7: until `owner` is dropped, `address` points to `len` elements of `dtype` in the memory of the stream's device, aligned to their
    /// size. Until then the library does not write them.
    pub unsafe fn foreign(
        stream: &Arc<Stream>,
        (dtype, len): (DType, usize),
        address: u64,
        owner: Owner,
    ) -> Result<Self, CudaError> {
        let uses = Uses::default();
        uses.note_write(&stream.moment()?);
        let foreign = Foreign { address, uses, stream: Arc::clone(stream), owner: Some(owner) };
        Self::of_foreign(stream.device(), (dtype, len), foreign)
    }
}
