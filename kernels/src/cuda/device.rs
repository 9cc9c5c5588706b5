//! A device: its context, its kernels, its memory.

use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute, CUfunction};
use parking_lot::Mutex;

use super::compile::{Architecture, compile};
use super::error::CudaError;
use super::event::Events;
use super::launch::THREADS;
use super::libraries::check_driver;
use super::memory::Pool;
use super::source::{Kernel, NAMES};
use super::staging::Stagings;
use super::stream::Stream;

/// A handle to a CUDA device. Handles to one device share its context (the primary one, which other libraries use, too), its
/// compiled kernels and its memory pool. These live as long as the process.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Shared>);

/// The state that all handles to a device share.
pub(super) struct Shared {
    pub(super) ordinal: usize,
    context: Handle<CUcontext>,
    multiprocessors: u32,
    architecture: Architecture,
    /// By the index of the kernel.
    kernels: OnceLock<Result<[Loaded; NAMES.len()], CudaError>>,
    pub(super) events: Events,
    pub(super) pool: Pool,
    pub(super) stagings: Stagings,
    /// A stream of this device, which is never dropped.
    reader: OnceLock<Result<Stream, CudaError>>,
}

/// A kernel that is loaded on the device.
#[derive(Clone, Copy)]
pub(super) struct Loaded {
    pub(super) function: Handle<CUfunction>,
    /// The number of its blocks that the device runs at a time. More blocks would only queue.
    pub(super) resident: u32,
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
    /// [`CudaError::MissingLibrary`] if the driver cannot be loaded; [`CudaError::NoDevice`] if it has no such device;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn new(ordinal: usize) -> Result<Self, CudaError> {
        static DEVICES: Mutex<Vec<(usize, Device)>> = Mutex::new(Vec::new());
        check_driver()?;
        let mut devices = DEVICES.lock();
        if let Some((_, device)) = devices.iter().find(|(known, _)| *known == ordinal) {
            return Ok(device.clone());
        }
        let device = Self(Arc::new(Shared::open(ordinal)?));
        devices.push((ordinal, device.clone()));
        Ok(device)
    }

    /// The number of devices that the driver has.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] if the driver cannot be loaded; [`CudaError::Driver`] if a call of the driver fails.
    pub fn count() -> Result<usize, CudaError> {
        check_driver()?;
        let count = result::init().and_then(|()| result::device::get_count());
        let count = count.map_err(|error| refused(0, "count devices", error))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The ordinal of the device in the driver, from 0.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// The architecture for which kernels are compiled.
    #[must_use]
    pub fn architecture(&self) -> Architecture {
        self.0.architecture
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
    pub(super) fn reader(&self) -> Result<&Stream, CudaError> {
        self.0.reader.get_or_init(|| self.stream()).as_ref().map_err(Clone::clone)
    }

    /// The number of blocks that the pool has allocated from the driver so far, in the size class of `bytes`. A step like the one
    /// before allocates none.
    #[must_use]
    pub fn allocations(&self, bytes: usize) -> u64 {
        self.0.pool.allocations(bytes)
    }

    /// Limits the memory that the pool allocates from the device to `bytes`, for a process that shares the device with others. Memory
    /// that is allocated already stays. Later allocations beyond the limit fail with [`CudaError::OutOfMemory`].
    pub fn limit_memory(&self, bytes: usize) {
        self.0.pool.budget.limit(bytes);
    }

    /// Compiles and loads the kernels now instead of at the first launch. That takes seconds, for which other ranks would wait. Later
    /// calls return the outcome of the first.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] if NVRTC cannot be loaded; [`CudaError::Compile`] if the kernels do not compile;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn prepare(&self) -> Result<(), CudaError> {
        self.0.kernels.get_or_init(|| self.compile()).as_ref().map(drop).map_err(Clone::clone)
    }

    /// Returns the pool's spare memory to the driver, for other libraries. Blocks that an operation still uses stay in the pool.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn release_spare_memory(&self) -> Result<(), CudaError> {
        self.0.pool.release(self)
    }

    /// Makes the context of the device current on this thread, for calls of other libraries.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn make_current(&self) -> Result<(), CudaError> {
        let context = self.0.context.0;
        let current =
            result::ctx::get_current().map_err(|error| self.refused("get the context", error))?;
        if current == Some(context) {
            return Ok(());
        }
        // SAFETY: CU-2, the context is retained for the life of the process.
        unsafe { result::ctx::set_current(context) }
            .map_err(|error| self.refused("set the context", error))
    }

    /// A loaded kernel. The first call compiles all kernels.
    pub(super) fn kernel(&self, kernel: Kernel) -> Result<Loaded, CudaError> {
        let kernels = self.0.kernels.get_or_init(|| self.compile());
        kernels.as_ref().map(|kernels| kernels[kernel.index()]).map_err(Clone::clone)
    }

    fn compile(&self) -> Result<[Loaded; NAMES.len()], CudaError> {
        self.make_current()?;
        let ptx = compile(self.architecture())?;
        let text = CString::new(ptx.to_src()).map_err(|_| CudaError::Compile {
            architecture: self.architecture().to_string(),
            log: "the PTX contains a zero byte".to_owned(),
        })?;
        // SAFETY: CU-3, the image is a text that ends in a zero, as the compiler made it.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
        let module = module.map_err(|error| self.refused("load the kernels", error))?;
        let of = |name: &str| {
            let symbol = CString::new(name).expect("a name without zeros");
            // SAFETY: CU-3, the module was just loaded, and is never unloaded.
            let function = unsafe { result::module::get_function(module, symbol) };
            let function = function.map_err(|error| self.refused(name, error))?;
            let resident = self.resident(function).map_err(|error| self.refused(name, error))?;
            Ok(Loaded { function: Handle(function), resident })
        };
        let loaded: Vec<Loaded> = NAMES.into_iter().map(of).collect::<Result<_, CudaError>>()?;
        Ok(std::array::from_fn(|index| loaded[index]))
    }

    /// The number of blocks of a kernel that the device runs at a time.
    fn resident(&self, function: CUfunction) -> Result<u32, result::DriverError> {
        let threads = i32::try_from(THREADS).unwrap_or(i32::MAX);
        // SAFETY: CU-3, the function was just found.
        let each = unsafe {
            result::occupancy::max_active_block_per_multiprocessor(function, threads, 0)
        }?;
        Ok(self.0.multiprocessors * u32::try_from(each).unwrap_or(0).max(1))
    }

    /// The error of a call of the driver that failed during `operation`.
    pub(super) fn refused(&self, operation: &str, error: result::DriverError) -> CudaError {
        refused(self.ordinal(), operation, error)
    }
}

fn refused(device: usize, operation: &str, error: result::DriverError) -> CudaError {
    let text = |of: Result<&CStr, _>| {
        of.map_or("a status that the driver does not know".into(), CStr::to_string_lossy)
            .into_owned()
    };
    let meaning = format!("{}: {}", text(error.error_name()), text(error.error_string()));
    CudaError::Driver { operation: operation.to_owned(), device, code: error.0 as u32, meaning }
}

impl Shared {
    fn open(ordinal: usize) -> Result<Self, CudaError> {
        let refuse = |operation: &'static str| move |error| refused(ordinal, operation, error);
        result::init().map_err(refuse("initialize the driver"))?;
        let count = result::device::get_count().map_err(refuse("count devices"))?;
        let count = usize::try_from(count).unwrap_or(0);
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(CudaError::NoDevice { ordinal, count })?;
        let device = result::device::get(number).map_err(refuse("open the device"))?;
        // SAFETY: CU-2, the device is there; its context is never released.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(refuse("retain the context"))?;
        let asked =
            |attribute| attribute_of(device, attribute).map_err(refuse("read an attribute"));
        let major = asked(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = asked(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = asked(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Self {
            ordinal,
            context: Handle(context),
            multiprocessors,
            architecture: Architecture(10 * major + minor),
            kernels: OnceLock::new(),
            events: Events::default(),
            pool: Pool::default(),
            stagings: Stagings::default(),
            reader: OnceLock::new(),
        })
    }
}

fn attribute_of(
    device: CUdevice,
    attribute: sys::CUdevice_attribute,
) -> Result<u32, result::DriverError> {
    // SAFETY: CU-2, the device is there.
    let value = unsafe { result::device::get_attribute(device, attribute) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
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
