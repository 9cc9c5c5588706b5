//! A device: its context, its kernels and their names, its memory.

use std::sync::OnceLock;
use std::{fmt, slice};

use parking_lot::Mutex;

use super::driver::{Blas, Loaded, OpenDevice};
use super::error::CudaError;
use super::memory::{Pool, Stagings};
use super::stream::{Events, Stream};
use crate::{MatrixDType, Wire};

/// A virtual architecture of CUDA: 90 is `compute_90`, that of an H100 or H200. Displayed as
/// `compute_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture(pub u32);

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compute_{}", self.0)
    }
}

/// A handle to a CUDA device. Handles to one device share its context (the primary one, which other
/// libraries use, too), its compiled kernels and its memory pool. These live as long as the
/// process.
#[derive(Clone)]
pub struct Device(OpenDevice);

/// The state that all handles to a device share.
#[derive(Default)]
pub(super) struct OfDevice {
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

// SAFETY: CU-2, the driver's handles are names that any thread may use when the context is current
// on it.
unsafe impl<T> Send for Handle<T> {}

// SAFETY: CU-2, as above.
unsafe impl<T> Sync for Handle<T> {}

impl Device {
    /// Opens the device of this ordinal of the driver, from 0. Later calls with the same ordinal
    /// return a handle to the same device.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] without the feature `cuda`; [`CudaError::MissingLibrary`] if the
    /// driver cannot be loaded; [`CudaError::NoDevice`] if it has no such device;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn new(ordinal: usize) -> Result<Self, CudaError> {
        static DEVICES: Mutex<Vec<Device>> = Mutex::new(Vec::new());
        let mut devices = DEVICES.lock();
        if let Some(known) = devices.iter().find(|device| device.ordinal() == ordinal).cloned() {
            return Ok(known);
        }
        let device = Self(OpenDevice::open(ordinal, OfDevice::default())?);
        devices.extend_from_slice(slice::from_ref(&device));
        Ok(device)
    }

    /// The number of devices that the driver has.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] without the feature `cuda`; [`CudaError::MissingLibrary`] if the
    /// driver cannot be loaded; [`CudaError::Driver`] if a call of the driver fails.
    pub fn count() -> Result<usize, CudaError> {
        OpenDevice::count()
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

    /// The stream for copies to the host by callers that have no stream. There is one per device,
    /// because a buffer keeps the last read of each stream.
    pub(crate) fn reader(&self) -> Result<&Stream, CudaError> {
        self.shared().reader.get_or_try_init(|| self.stream())
    }

    /// The number of blocks that the pool has allocated from the driver so far, in the size class
    /// of `bytes`. A step like the one before allocates none.
    #[must_use]
    pub fn allocations(&self, bytes: usize) -> u64 {
        self.shared().pool.allocations(bytes)
    }

    /// Limits the memory that the pool allocates from the device to `bytes`, for a process that
    /// shares the device with others. Memory that is allocated already stays. Later allocations
    /// beyond the limit fail with [`CudaError::OutOfMemory`].
    pub fn limit_memory(&self, bytes: usize) {
        self.shared().pool.budget.limit(bytes);
    }

    /// Compiles and loads the kernels now instead of at the first launch. That takes seconds, for
    /// which other ranks would wait. Later calls return the outcome of the first.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] if NVRTC cannot be loaded; [`CudaError::Compile`] if the
    /// kernels do not compile; [`CudaError::Driver`] if a call of the driver fails.
    pub fn prepare(&self) -> Result<(), CudaError> {
        // All kernels are loaded with the first, whichever it is.
        self.kernel(CudaKernel::InspectBlocks)?;
        Ok(())
    }

    /// Returns the pool's spare memory to the driver, for other libraries. Blocks that an operation
    /// still uses stay in the pool.
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
    pub(super) fn kernel(&self, kernel: CudaKernel) -> Result<Loaded, CudaError> {
        let kernels = self.shared().kernels.get_or_init(|| self.0.load(&NAMES));
        kernels.as_ref().map(|kernels| kernels[kernel.index()]).map_err(Clone::clone)
    }

    /// cuBLAS on this device. The first call that succeeds loads it: the device may have no memory
    /// for it at first.
    pub(super) fn blas(&self) -> Result<&Blas, CudaError> {
        self.shared().blas.get_or_try_init(|| self.0.blas())
    }

    pub(super) fn context(&self) -> &OpenDevice {
        &self.0
    }

    pub(super) fn shared(&self) -> &OfDevice {
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

/// A value that is made once. A failure to make it is not kept, so a later call can succeed.
#[derive(Debug)]
pub(super) struct Once<T> {
    value: OnceLock<T>,
    /// Locked while the value is made.
    making: Mutex<()>,
}

impl<T> Default for Once<T> {
    fn default() -> Self {
        Self { value: OnceLock::new(), making: Mutex::new(()) }
    }
}

impl<T> Once<T> {
    /// The value, which `make` makes if there is none. Threads make it one after the other.
    pub(super) fn get_or_try_init(
        &self,
        make: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<&T, CudaError> {
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let _making = self.making.lock();
        match self.value.get() {
            Some(value) => Ok(value),
            None => make().map(|value| self.value.get_or_init(|| value)),
        }
    }
}

/// A kernel, with the dtype of its wire, the dtype to which it casts parameters, or the dtype to
/// which it rounds what it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CudaKernel {
    Pack(Wire),
    Sum(Wire),
    Narrow(Wire),
    AdamW(Cast),
    Sgd(Cast),
    Lion(Cast),
    Muon(Cast),
    Inspect(MatrixDType),
    InspectBlocks,
    Normalize(MatrixDType),
    MuonDirection,
    Widen,
}

/// The dtype to which updated parameters are cast; `Alone` without a cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cast {
    Alone,
    F16,
    BF16,
}

/// The name of each kernel, at its index.
#[rustfmt::skip]
pub(super) const NAMES: [&str; 28] = [
    "pack_f32", "pack_f16", "pack_bf16",
    "sum_f32", "sum_f16", "sum_bf16",
    "narrow_f32", "narrow_f16", "narrow_bf16",
    "adamw_alone", "adamw_f16", "adamw_bf16",
    "sgd_alone", "sgd_f16", "sgd_bf16",
    "lion_alone", "lion_f16", "lion_bf16",
    "muon_alone", "muon_f16", "muon_bf16",
    "inspect_f32", "inspect_bf16", "inspect_blocks",
    "normalize_f32", "normalize_bf16", "muon_direction",
    "widen",
];

impl CudaKernel {
    /// Its index in [`NAMES`], so that a launch needs no lookup by name.
    pub(super) fn index(self) -> usize {
        let (row, column) = match self {
            Self::Pack(wire) => (0, wire as usize),
            Self::Sum(wire) => (1, wire as usize),
            Self::Narrow(wire) => (2, wire as usize),
            Self::AdamW(cast) => (3, cast as usize),
            Self::Sgd(cast) => (4, cast as usize),
            Self::Lion(cast) => (5, cast as usize),
            Self::Muon(cast) => (6, cast as usize),
            Self::Inspect(dtype) => (7, dtype as usize),
            Self::InspectBlocks => (7, 2),
            Self::Normalize(dtype) => (8, dtype as usize),
            Self::MuonDirection => (8, 2),
            Self::Widen => (9, 0),
        };
        3 * row + column
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_success_is_kept() {
        let once = Once::default();
        let refused = once.get_or_try_init(|| Err(CudaError::NotBuilt));
        assert_eq!(refused, Err(CudaError::NotBuilt));
        assert_eq!(once.get_or_try_init(|| Ok(1)), Ok(&1));
        assert_eq!(once.get_or_try_init(|| Ok(2)), Ok(&1));
        assert_eq!(once.get_or_try_init(|| Err(CudaError::NotBuilt)), Ok(&1));
    }

    const WIRES: [(Wire, &str); 3] = [(Wire::F32, "f32"), (Wire::F16, "f16"), (Wire::BF16, "bf16")];
    const CASTS: [(Cast, &str); 3] =
        [(Cast::Alone, "alone"), (Cast::F16, "f16"), (Cast::BF16, "bf16")];

    /// Each kernel, and the name that follows from its parts.
    fn all() -> Vec<(CudaKernel, String)> {
        let mut all = Vec::new();
        for (wire, end) in WIRES {
            let kernels = [
                (CudaKernel::Pack(wire), "pack"),
                (CudaKernel::Sum(wire), "sum"),
                (CudaKernel::Narrow(wire), "narrow"),
            ];
            all.extend(kernels.map(|(kernel, name)| (kernel, format!("{name}_{end}"))));
        }
        for (cast, end) in CASTS {
            let kernels = [
                (CudaKernel::AdamW(cast), "adamw"),
                (CudaKernel::Sgd(cast), "sgd"),
                (CudaKernel::Lion(cast), "lion"),
                (CudaKernel::Muon(cast), "muon"),
            ];
            all.extend(kernels.map(|(kernel, name)| (kernel, format!("{name}_{end}"))));
        }
        for dtype in [MatrixDType::F32, MatrixDType::BF16] {
            let kernels = [
                (CudaKernel::Inspect(dtype), "inspect"),
                (CudaKernel::Normalize(dtype), "normalize"),
            ];
            all.extend(kernels.map(|(kernel, name)| (kernel, format!("{name}_{dtype}"))));
        }
        all.push((CudaKernel::InspectBlocks, "inspect_blocks".to_owned()));
        all.push((CudaKernel::MuonDirection, "muon_direction".to_owned()));
        all.push((CudaKernel::Widen, "widen".to_owned()));
        all
    }

    #[test]
    fn every_kernel_has_an_index_and_a_name_of_its_own() {
        let mut indices: Vec<usize> = all().iter().map(|(kernel, _)| kernel.index()).collect();
        indices.sort_unstable();
        assert_eq!(indices, (0..NAMES.len()).collect::<Vec<_>>());
        for (kernel, name) in all() {
            assert_eq!(NAMES[kernel.index()], name, "{kernel:?}");
        }
    }
}
