//! The calls of the driver. All of this crate makes them through [`OpenDevice`]; no other module knows
//! the bindings.

mod cublas;
mod libraries;

use std::ffi::{CStr, CString};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUevent_flags, CUevent_wait_flags, CUfunction,
    CUresult,
};
use cudarc::driver::{DriverError, result};

use self::libraries::check_driver;
pub use self::libraries::compile;
use super::device::{Architecture, Handle, OfDevice};
use super::error::CudaError;
use super::launch::THREADS;
use super::stream::{Apart, DriverCall};

pub(super) use self::cublas::Blas;
pub(super) use cudarc::driver::sys::{CUevent, CUstream};

/// Whether this build has devices: whether it has the feature `cuda`.
pub const HAS_DEVICES: bool = true;

/// A device that is open. It is never closed, so this is a name for it that any thread may use.
#[derive(Clone, Copy)]
pub(super) struct OpenDevice(&'static Opened);

/// A device, with its primary context, which is never released.
struct Opened {
    ordinal: usize,
    raw: Handle<CUcontext>,
    multiprocessors: u32,
    architecture: Architecture,
    shared: OfDevice,
}

/// A kernel that is loaded on a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loaded {
    name: &'static str,
    function: Handle<CUfunction>,
    resident: u32,
}

impl Loaded {
    /// The number of its blocks that the device runs at a time. More blocks would only queue.
    pub(super) fn resident(&self) -> u32 {
        self.resident
    }
}

impl OpenDevice {
    pub(super) fn count() -> Result<usize, CudaError> {
        check_driver()?;
        let count = result::init().and_then(|()| result::device::get_count());
        let count = count.map_err(|error| refused(0, "count devices", error))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(super) fn open(ordinal: usize, shared: OfDevice) -> Result<Self, CudaError> {
        let count = Self::count()?;
        let refuse = |operation: &'static str| move |error| refused(ordinal, operation, error);
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(CudaError::NoDevice { ordinal, count })?;
        let device = result::device::get(number).map_err(refuse("open the device"))?;
        // SAFETY: CU-2, the device is there; its context is never released.
        let context = unsafe { result::primary_ctx::retain(device) };
        let raw = Handle(context.map_err(refuse("retain the context"))?);
        let asked =
            |attribute| attribute_of(device, attribute).map_err(refuse("read an attribute"));
        let major = asked(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = asked(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = asked(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let architecture = Architecture(10 * major + minor);
        let opened = Opened { ordinal, raw, multiprocessors, architecture, shared };
        Ok(Self(Box::leak(Box::new(opened))))
    }

    pub(super) fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    pub(super) fn architecture(&self) -> Architecture {
        self.0.architecture
    }

    /// The parts of this crate that all handles to the device share.
    pub(super) fn shared(&self) -> &OfDevice {
        &self.0.shared
    }

    pub(super) fn make_current(&self) -> Result<(), CudaError> {
        let current = self.told("get the context", result::ctx::get_current())?;
        if current == Some(self.0.raw.0) {
            return Ok(());
        }
        // SAFETY: CU-2, the context is retained for the life of the process.
        self.told("set the context", unsafe { result::ctx::set_current(self.0.raw.0) })
    }

    /// Compiles and loads the kernels of these names.
    pub(super) fn load(&self, names: &[&'static str]) -> Result<Vec<Loaded>, CudaError> {
        self.make_current()?;
        let architecture = self.0.architecture;
        let text = CString::new(compile(architecture)?).map_err(|_| CudaError::Compile {
            architecture: architecture.to_string(),
            log: "the PTX contains a zero byte".to_owned(),
        })?;
        let _apart = Apart::begin();
        // SAFETY: CU-3, the image is a text that ends in a zero, as the compiler made it.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
        let module = self.told("load the kernels", module)?;
        let of = |name: &&'static str| {
            let symbol = CString::new(*name).expect("a name without zeros");
            // SAFETY: CU-3, the module was just loaded, and is never unloaded.
            let function = unsafe { result::module::get_function(module, symbol) };
            let function = self.told(name, function)?;
            let resident = self.told(name, self.resident(function))?;
            Ok(Loaded { name, function: Handle(function), resident })
        };
        names.iter().map(of).collect()
    }

    /// The number of blocks of a kernel that the device runs at a time.
    fn resident(&self, function: CUfunction) -> Result<u32, DriverError> {
        let threads = i32::try_from(THREADS).unwrap_or(i32::MAX);
        // SAFETY: CU-3, the function was just found.
        let each = unsafe {
            result::occupancy::max_active_block_per_multiprocessor(function, threads, 0)
        }?;
        Ok(self.0.multiprocessors * u32::try_from(each).unwrap_or(0).max(1))
    }

    /// A new stream, which does not synchronize with the default stream.
    pub(super) fn stream(&self) -> Result<CUstream, CudaError> {
        self.make_current()?;
        let kind = result::stream::StreamKind::NonBlocking;
        self.told("make a stream", result::stream::create(kind))
    }

    /// # Safety
    /// CU-2: the stream lives, and is not used any more.
    pub(super) unsafe fn destroy(&self, stream: CUstream) -> Result<(), CudaError> {
        self.make_current()?;
        // SAFETY: CU-2, the caller's promise is passed on.
        self.told("destroy a stream", unsafe { result::stream::destroy(stream) })
    }

    /// A new event; the context is current.
    pub(super) fn event(&self) -> Result<CUevent, CudaError> {
        self.told("make an event", result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING))
    }

    /// Records the end of all operations that were issued on the stream so far.
    ///
    /// # Safety
    /// CU-2: both live, and the context is current.
    pub(super) unsafe fn record(&self, event: CUevent, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: CU-2, the caller's promise is passed on.
        self.told("record an event", unsafe { result::event::record(event, stream) })
    }

    /// Makes the stream wait for an event, on the device.
    ///
    /// # Safety
    /// CU-2: both live; the event was recorded.
    pub(super) unsafe fn wait_on(&self, stream: CUstream, event: CUevent) -> Result<(), CudaError> {
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: CU-2, the caller's promise is passed on.
        let waits = unsafe { result::stream::wait_event(stream, event, flags) };
        self.told("wait for an event", waits)
    }

    /// Whether the device has reached an event.
    ///
    /// # Safety
    /// CU-2: the event lives, and was recorded.
    pub(super) unsafe fn has_reached(&self, event: CUevent) -> Result<bool, CudaError> {
        self.make_current()?;
        // SAFETY: CU-2, the caller's promise is passed on.
        match unsafe { result::event::query(event) } {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            outcome => self.told("query an event", outcome.map(|()| true)),
        }
    }

    /// Allocates `size` bytes of the device; `None` if it has no memory left. The context is
    /// current.
    ///
    /// # Safety
    /// CU-4: the memory belongs to one block.
    pub(super) unsafe fn allocate(&self, size: usize) -> Result<Option<u64>, CudaError> {
        let _apart = Apart::begin();
        // SAFETY: CU-4, the caller's promise is passed on.
        match unsafe { result::malloc_sync(size) } {
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            outcome => self.told("allocate memory", outcome.map(Some)),
        }
    }

    /// # Safety
    /// CU-4: no buffer holds the memory, and it is freed once.
    pub(super) unsafe fn free(&self, address: u64) -> Result<(), CudaError> {
        let _apart = Apart::begin();
        // SAFETY: CU-4, the caller's promise is passed on.
        self.told("free memory", unsafe { result::free_sync(address) })
    }

    /// The bytes of the device that are free, and all its bytes; zeros if the driver does not tell.
    pub(super) fn memory(&self) -> (usize, usize) {
        let known = self.make_current().ok().and_then(|()| result::mem_get_info().ok());
        known.unwrap_or_default()
    }

    /// Allocates page-locked memory of the host, which is never freed. The context is current.
    pub(super) fn lock_pages(&self, len: usize) -> Result<*mut u8, CudaError> {
        let _apart = Apart::begin();
        // SAFETY: CU-6, the memory is never freed: pieces go from copy to copy.
        let start = unsafe { result::malloc_host(len, 0) };
        Ok(self.told("lock pages", start)?.cast())
    }

    /// Issues an operation; the context is current.
    ///
    /// # Safety
    /// CU-5: the operation uses memory only as its stream was told, and the host memory of a copy
    /// stays until the copy is done.
    pub(super) unsafe fn issue(
        &self,
        stream: CUstream,
        operation: DriverCall<'_>,
    ) -> Result<(), CudaError> {
        let name = name(&operation);
        let issued = match operation {
            DriverCall::Fill { address, byte, bytes } => {
                // SAFETY: CU-5, the caller's promise is passed on.
                unsafe { result::memset_d8_async(address, byte, bytes, stream) }
            }
            DriverCall::CopyIn { to, from } => {
                // SAFETY: CU-5, as above.
                unsafe { result::memcpy_htod_async(to, from, stream) }
            }
            DriverCall::Copy { to, from, bytes } => {
                // SAFETY: CU-5, as above.
                unsafe { result::memcpy_dtod_async(to, from, bytes, stream) }
            }
            DriverCall::CopyOut { to, from } => {
                // SAFETY: CU-5, as above.
                unsafe { result::memcpy_dtoh_async(to, from, stream) }
            }
            DriverCall::Launch { kernel, blocks, threads, arguments } => {
                let function = kernel.function.0;
                let grid = (blocks, 1, 1);
                let block = (threads, 1, 1);
                // SAFETY: CU-5, as above; the arguments are alive, and are copied.
                unsafe { result::launch_kernel(function, grid, block, 0, stream, arguments) }
            }
        };
        self.told(name, issued)
    }

    /// The outcome of a call that is made for `operation`.
    fn told<T>(&self, operation: &str, outcome: Result<T, DriverError>) -> Result<T, CudaError> {
        outcome.map_err(|error| refused(self.0.ordinal, operation, error))
    }
}

/// The name of an operation in an error.
fn name(operation: &DriverCall<'_>) -> &'static str {
    match operation {
        DriverCall::Fill { .. } => "fill",
        DriverCall::CopyIn { .. } => "copy to the device",
        DriverCall::Copy { .. } => "copy",
        DriverCall::CopyOut { .. } => "copy to the host",
        DriverCall::Launch { kernel, .. } => kernel.name,
    }
}

fn refused(device: usize, operation: &str, error: DriverError) -> CudaError {
    let text = |of: Result<&CStr, _>| {
        of.map_or("a status that the driver does not know".into(), CStr::to_string_lossy)
            .into_owned()
    };
    let meaning = format!("{}: {}", text(error.error_name()), text(error.error_string()));
    CudaError::Driver { operation: operation.to_owned(), device, code: error.0 as u32, meaning }
}

fn attribute_of(device: CUdevice, attribute: CUdevice_attribute) -> Result<u32, DriverError> {
    // SAFETY: CU-2, the device is there.
    let value = unsafe { result::device::get_attribute(device, attribute) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}
