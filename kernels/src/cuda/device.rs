//! A device: its context, its kernels, its memory.

use std::fmt;
use std::slice;
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::driver::{Blas, Context, Loaded};
use super::error::CudaError;
use super::event::Events;
use super::kernel::{Kernel, NAMES};
use super::memory::Pool;
use super::once::Once;
use super::staging::Stagings;
use super::stream::Stream;

/// A virtual architecture of CUDA: 90 is `compute_90`, that of an H100 or H200. Displayed as `compute_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture(pub u32);

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compute_{}", self.0)
    }
}

/// A handle to a CUDA device. Handles to one device share its context (the primary one, which other libraries use, too), its
/// compiled kernels and its memory pool. These live as long as the process.
#[derive(Clone)]
pub struct Device(Context);

/// The state that all handles to a device share.
#[derive(Default)]
pub(super) struct Shared {
    /// By the index of the kernel.
    kernels: OnceLock<Result<Vec<Loaded>, CudaError>>,
    pub(super) events: Events,
    pub(super) pool: Pool,
    pub(super) stagings: Stagings,
    blas: Once<Blas>,
    /// A stream of this device, which is never dropped.
    reader: Once<Stream>,
}

/// A handle of the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle<T>(pub(super) T);

// SAFETY: CU-2, the driver's handles are names that any thread may use when the context is current on it.
unsafe impl<T> Send for Handle<T> {}

// SAFETY: CU-2, as above.
unsafe impl<T> Sync for Handle<T> {}

impl Device {
    /// Opens the device of this ordinal of the driver, from 0. Later calls with the same ordinal return a handle to the same device.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] without the feature `cuda`; [`CudaError::MissingLibrary`] if the driver cannot be loaded;
    /// [`CudaError::NoDevice`] if it has no such device; [`CudaError::Driver`] if a call of the driver fails.
    pub fn new(ordinal: usize) -> Result<Self, CudaError> {
        static DEVICES: Mutex<Vec<Device>> = Mutex::new(Vec::new());
        let mut devices = DEVICES.lock();
        if let Some(known) = devices.iter().find(|device| device.ordinal() == ordinal).cloned() {
            return Ok(known);
        }
        let device = Self(Context::open(ordinal, Shared::default())?);
        devices.extend_from_slice(slice::from_ref(&device));
        Ok(device)
    }

    /// The number of devices that the driver has.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] without the feature `cuda`; [`CudaError::MissingLibrary`] if the driver cannot be loaded;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn count() -> Result<usize, CudaError> {
        Context::count()
    }

    /// The ordinal of the device in the driver, from 0.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.0.ordinal()
    }

    /// The architecture for which kernels are compiled.
    #[must_use]
    pub fn architecture(&self) -> Architecture {
        self.0.architecture()
    }

    /// Makes a stream, which does not synchronize with the default stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        Stream::new(self)
    }

    /// The stream for copies to the host by callers that have no stream. There is one per device, because a buffer keeps the last read
    /// of each stream.
    pub(crate) fn reader(&self) -> Result<&Stream, CudaError> {
        self.shared().reader.get_or_try_init(|| self.stream())
    }

    /// The number of blocks that the pool has allocated from the driver so far, in the size class of `bytes`. A step like the one
    /// before allocates none.
    #[must_use]
    pub fn allocations(&self, bytes: usize) -> u64 {
        self.shared().pool.allocations(bytes)
    }

    /// Limits the memory that the pool allocates from the device to `bytes`, for a process that shares the device with others. Memory
    /// that is allocated already stays. Later allocations beyond the limit fail with [`CudaError::OutOfMemory`].
    pub fn limit_memory(&self, bytes: usize) {
        self.shared().pool.budget.limit(bytes);
    }

    /// Compiles and loads the kernels now instead of at the first launch. That takes seconds, for which other ranks would wait. Later
    /// calls return the outcome of the first.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] if NVRTC cannot be loaded; [`CudaError::Compile`] if the kernels do not compile;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn prepare(&self) -> Result<(), CudaError> {
        self.shared()
            .kernels
            .get_or_init(|| self.0.load(&NAMES))
            .as_ref()
            .map(drop)
            .map_err(Clone::clone)
    }

    /// Returns the pool's spare memory to the driver, for other libraries. Blocks that an operation still uses stay in the pool.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn release_spare_memory(&self) -> Result<(), CudaError> {
        self.shared().pool.release(self)
    }

    /// Makes the context of the device current on this thread, for calls of other libraries.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn make_current(&self) -> Result<(), CudaError> {
        self.0.make_current()
    }

    /// A loaded kernel. The first call compiles all kernels.
    pub(super) fn kernel(&self, kernel: Kernel) -> Result<Loaded, CudaError> {
        let kernels = self.shared().kernels.get_or_init(|| self.0.load(&NAMES));
        kernels.as_ref().map(|kernels| kernels[kernel.index()]).map_err(Clone::clone)
    }

    /// cuBLAS on this device. The first call that succeeds loads it: the device may have no memory for it at first.
    pub(super) fn blas(&self) -> Result<&Blas, CudaError> {
        self.shared().blas.get_or_try_init(|| self.0.blas())
    }

    pub(super) fn context(&self) -> &Context {
        &self.0
    }

    pub(super) fn shared(&self) -> &Shared {
        self.0.shared()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.ordinal() == other.ordinal()
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.ordinal())
            .field("architecture", &self.architecture())
            .finish_non_exhaustive()
    }
}
