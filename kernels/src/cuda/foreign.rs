//! Memory and streams that another library owns. `CUDA.md`, "What others own".

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::memory::Uses;
use super::stream::Stream;

/// What keeps foreign memory alive: dropped when the library may have it again.
type Owner = Box<dyn Any + Send + Sync>;

/// A piece of device memory that a library has lent.
pub(super) struct Foreign {
    pub(super) address: CUdeviceptr,
    pub(super) uses: Uses,
    /// The library's, on which it uses and frees the memory.
    stream: Arc<Stream>,
    /// There until it is given back.
    owner: Option<Owner>,
}

impl Foreign {
    /// Has the library's stream wait for what was done with the memory, and gives it back.
    pub(super) fn give_back(mut self) {
        let owner = self.owner.take();
        if let Err(error) = self.stream.wait_for(&self.uses) {
            // Nobody knows when the device is done with it: the library never gets it back.
            tracing::warn!(%error, "memory that a library had lent cannot be given back");
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
    /// Elements in memory that another library owns and uses on `stream`: what it has issued there so far comes before all that is
    /// done with the buffer, and what it issues after the buffer is dropped comes behind. `owner` keeps the memory alive, and is dropped
    /// with the buffer.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the dtype is not f32, f16 or bf16; [`CudaError::Driver`].
    ///
    /// # Safety
    /// CU-7: from `address` on lie so many elements of the stream's device, aligned to their size, until `owner` is dropped; meanwhile the library
    /// reads them at the most.
    pub unsafe fn foreign(
        stream: &Arc<Stream>,
        (dtype, len): (DType, usize),
        address: CUdeviceptr,
        owner: Owner,
    ) -> Result<Self, CudaError> {
        let uses = Uses::default();
        uses.note_write(&stream.moment()?);
        let foreign = Foreign { address, uses, stream: Arc::clone(stream), owner: Some(owner) };
        Self::of_foreign(stream.device(), (dtype, len), foreign)
    }
}
