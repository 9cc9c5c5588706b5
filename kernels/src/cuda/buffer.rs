//! A buffer in the memory of a device, whose dtype is known at run time; parts of buffers, and
//! memory of other libraries.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use hsdp_sharding::DType;

use super::device::Device;
use super::error::CudaError;
use super::memory::{MemoryBlock, Staging, Uses, exhausted};
use super::stream::{DriverCall, Stream};
use crate::buffer::HostBuffer;
use crate::error::Error;
use crate::memory::{self, Category, DeviceCharge, charge_on_device};
use crate::values::Values;
use crate::wire::Wire;

/// A buffer of elements in the memory of a device, of dtype f32, f16 or bf16. The elements are
/// undefined until they are written.
///
/// A buffer that is dropped returns its memory to the device's pool at once. The next user of the
/// memory waits on the device for all operations that use it.
pub struct DeviceBuffer {
    device: Device,
    dtype: DType,
    /// The counters of its bytes.
    charge: DeviceCharge,
    len: usize,
    /// `Some` until the buffer is dropped.
    memory: Option<Memory>,
}

/// A copy from the host, in errors.
const WRITE: &str = "write to a device";

/// The memory of the elements.
#[derive(Debug)]
enum Memory {
    Own(MemoryBlock),
    Lent(Box<Foreign>),
}

impl DeviceBuffer {
    /// Takes memory for `len` elements of `dtype` from the device's pool. The bytes count in the
    /// [scope](crate::memory::scope) of this thread. `what` names the purpose in an error.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the dtype is not f32, f16 or bf16; [`CudaError::OutOfMemory`] if
    /// the device has no memory left; [`CudaError::Driver`] if a call of the driver fails.
    pub fn new(device: &Device, dtype: DType, len: usize, what: &str) -> Result<Self, CudaError> {
        check_dtype(dtype)?;
        let bytes =
            len.checked_mul(dtype.size_bytes()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| exhausted(device, usize::MAX, what))?;
        let block = {
            // The host memory of the pool's own records does not count in the caller's scope.
            let _other = memory::scope(Category::Other);
            device.shared().pool.take(device, bytes, what)?
        };
        Ok(Self {
            device: device.clone(),
            dtype,
            charge: charge_on_device(bytes),
            len,
            memory: Some(Memory::Own(block)),
        })
    }

    /// The device in whose memory the elements lie.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The dtype of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device address of element `index`, for kernels of other libraries that are issued
    /// through [`Stream::enqueue`].
    ///
    /// # Panics
    /// If `index` is greater than the number of elements.
    #[must_use]
    pub fn address(&self, index: usize) -> u64 {
        assert!(index <= self.len, "element {index} of a buffer of {}", self.len);
        self.start() + (index * self.dtype.size_bytes()) as u64
    }

    /// The size of the elements in bytes.
    fn bytes(&self) -> usize {
        self.len * self.dtype.size_bytes()
    }

    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("present until the buffer is dropped")
    }

    fn start(&self) -> u64 {
        match self.memory() {
            Memory::Own(block) => block.address,
            Memory::Lent(foreign) => foreign.address,
        }
    }

    pub(super) fn uses(&self) -> &Uses {
        match self.memory() {
            Memory::Own(block) => &block.uses,
            Memory::Lent(foreign) => &foreign.uses,
        }
    }

    /// Writes `byte` to all bytes of all elements; with 0 all elements become zeros.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if `stream` is of another device; [`CudaError::Driver`] if a call of
    /// the driver fails.
    pub fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        let fill = DriverCall::Fill { address: self.address(0), byte, bytes: self.bytes() };
        // SAFETY: CU-5, the bytes are the buffer's, which is noted as written.
        unsafe { stream.issue(&[], &mut [self], fill) }?;
        Ok(())
    }

    /// Copies all elements from the host, of the same dtype and length. `values` have been read
    /// when the call returns; the copy to the device is only issued.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if dtype or length differ, or `stream` is of another device;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn write(&mut self, stream: &Stream, values: Values<'_>) -> Result<(), CudaError> {
        self.check(WRITE, values.dtype(), values.len())?;
        self.write_part(stream, 0, values)
    }

    /// Copies elements from the host, of the same dtype, to the elements from `from` on. `values`
    /// have been read when the call returns; the copy to the device is only issued.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the dtype differs, the elements reach beyond the buffer, or
    /// `stream` is of another device; [`CudaError::Driver`] if a call of the driver fails.
    pub fn write_part(
        &mut self,
        stream: &Stream,
        from: usize,
        values: Values<'_>,
    ) -> Result<(), CudaError> {
        self.check(WRITE, values.dtype(), self.len)?;
        self.check_range(WRITE, &(from..from.saturating_add(values.len())))?;
        let source = match values {
            Values::F32(values) => bytemuck::cast_slice::<_, u8>(values),
            Values::F16(values) => bytemuck::cast_slice(values),
            Values::BF16(values) => bytemuck::cast_slice(values),
        };
        let mut staging = Staging::take(&self.device, source.len())?;
        let staged = &mut staging.bytes()[..source.len()];
        staged.copy_from_slice(source);
        let copy = DriverCall::CopyIn { to: self.address(from), from: staged };
        // SAFETY: CU-5, the buffer has room for the bytes, and they stay until the copy's moment.
        match unsafe { stream.issue(&[], &mut [self], copy) } {
            Ok(moment) => staging.until(moment),
            Err(error) => {
                staging.leak();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Copies the elements `from` of `source`, another buffer of the device, to the elements
    /// `range` of this one. Dtypes and numbers of elements must be equal.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if dtypes or lengths differ, a range reaches beyond its buffer, or a
    /// buffer or `stream` is of another device; [`CudaError::Driver`] if a call of the driver
    /// fails.
    pub fn copy(
        &mut self,
        stream: &Stream,
        range: Range<usize>,
        source: &Self,
        from: Range<usize>,
    ) -> Result<(), CudaError> {
        source.check("copy", self.dtype, source.len)?;
        for (buffer, range) in [(&*self, &range), (source, &from)] {
            let fits = range.start <= range.end && range.end <= buffer.len;
            if !fits || range.len() != from.len() {
                let problem = format!(
                    "range {range:?} of a buffer of {} elements, in a copy of {} elements",
                    buffer.len,
                    from.len()
                );
                return Err(CudaError::Mismatch { operation: "copy", problem });
            }
        }
        let to = self.address(range.start);
        let bytes = range.len() * self.dtype.size_bytes();
        let copy = DriverCall::Copy { to, from: source.address(from.start), bytes };
        // SAFETY: CU-5, both ranges lie in their buffers, which are two, and have so many bytes.
        unsafe { stream.issue(&[source], &mut [self], copy) }?;
        Ok(())
    }

    /// Copies all elements to the host, and waits for the copy for at most `patience`.
    ///
    /// # Errors
    /// [`CudaError::Late`] if the copy is not done after `patience`; [`CudaError::Mismatch`] if
    /// `stream` is of another device; [`CudaError::Driver`] if a call of the driver fails, or an
    /// operation before the copy has failed.
    pub fn read_back(&self, stream: &Stream, patience: Duration) -> Result<HostBuffer, CudaError> {
        let mut staging = self.staged(stream, 0..self.len, patience)?;
        let bytes = &staging.bytes()[..self.bytes()];
        Ok(match self.dtype {
            DType::F16 => HostBuffer::F16(bytemuck::pod_collect_to_vec::<u8, f16>(bytes)),
            DType::BF16 => HostBuffer::BF16(bytemuck::pod_collect_to_vec::<u8, bf16>(bytes)),
            _ => HostBuffer::F32(bytemuck::pod_collect_to_vec::<u8, f32>(bytes)),
        })
    }

    /// Copies `into.len()` f32 elements to the host, beginning with element `from`, and waits for
    /// the copy for at most `patience`.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the buffer has too few elements, if its dtype is not f32, or if
    /// the stream is of another device; [`CudaError::Late`] if the copy is not done after
    /// `patience`; [`CudaError::Driver`] if a call of the driver fails, or an operation before the
    /// copy has failed.
    pub fn read_back_into(
        &self,
        stream: &Stream,
        from: usize,
        into: &mut [f32],
        patience: Duration,
    ) -> Result<(), CudaError> {
        let operation = "copy to the host";
        self.check(operation, DType::F32, self.len)?;
        let range = from..from.saturating_add(into.len());
        self.check_range(operation, &range)?;
        let bytes = size_of_val(into);
        let mut staging = self.staged(stream, range, patience)?;
        bytemuck::cast_slice_mut(into).copy_from_slice(&staging.bytes()[..bytes]);
        Ok(())
    }

    fn check_range(&self, operation: &'static str, range: &Range<usize>) -> Result<(), CudaError> {
        if range.end <= self.len {
            return Ok(());
        }
        let problem = format!("{range:?} reaches beyond the buffer of {} elements", self.len);
        Err(CudaError::Mismatch { operation, problem })
    }

    /// Copies `range` to page-locked memory, from its beginning on, and waits for the copy.
    fn staged(
        &self,
        stream: &Stream,
        range: Range<usize>,
        patience: Duration,
    ) -> Result<Staging, CudaError> {
        let len = range.len() * self.dtype.size_bytes();
        let mut staging = Staging::take(&self.device, len)?;
        let to = &mut staging.bytes()[..len];
        let copy = DriverCall::CopyOut { to, from: self.address(range.start) };
        // SAFETY: CU-5, the buffer has so many bytes; they are read after the copy, or never again.
        let issued = unsafe { stream.issue(&[self], &mut [], copy) };
        match issued.and_then(|moment| moment.wait("copy to the host", patience)) {
            Ok(()) => Ok(staging),
            Err(error) => {
                staging.leak();
                Err(error)
            }
        }
    }

    /// # Errors
    /// [`CudaError::Mismatch`] if it has another dtype or another length.
    pub(super) fn check(
        &self,
        operation: &'static str,
        dtype: DType,
        len: usize,
    ) -> Result<(), CudaError> {
        if self.dtype == dtype && self.len == len {
            return Ok(());
        }
        let own = self.dtype;
        let own_len = self.len;
        let problem =
            format!("a buffer has {own_len} elements of {own}, but {len} of {dtype} are expected");
        Err(CudaError::Mismatch { operation, problem })
    }
}

fn check_dtype(dtype: DType) -> Result<(), CudaError> {
    let operation = "make a device buffer";
    let refused = |error: Error| CudaError::Mismatch { operation, problem: error.to_string() };
    Wire::try_from(dtype).map_err(refused)?;
    Ok(())
}

/// The device may still use the memory: its uses stay with the block.
impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        match self.memory.take() {
            Some(Memory::Own(block)) => {
                self.charge.refund(self.bytes());
                self.device.shared().pool.give_back(block);
            }
            Some(Memory::Lent(foreign)) => foreign.give_back(),
            None => {}
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("device", &self.device.ordinal())
            .field("dtype", &self.dtype)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A slice of a [`DeviceBuffer`]: consecutive elements of it.
#[derive(Clone, Debug)]
pub struct DeviceSlice<'a> {
    buffer: &'a DeviceBuffer,
    range: Range<usize>,
}

impl<'a> DeviceSlice<'a> {
    /// The elements `range` of `buffer`.
    ///
    /// # Panics
    /// If `range` reaches beyond the end, or ends before it starts.
    #[must_use]
    pub fn new(buffer: &'a DeviceBuffer, range: Range<usize>) -> Self {
        let Range { start, end } = range;
        let len = buffer.len();
        assert!(start <= end && end <= len, "slice {start}..{end} of a buffer of {len} elements");
        Self { buffer, range: start..end }
    }

    /// The buffer in which the elements lie.
    #[must_use]
    pub fn buffer(&self) -> &'a DeviceBuffer {
        self.buffer
    }

    /// The range of the elements in the buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The dtype of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.buffer.dtype()
    }
}

impl<'a> From<&'a DeviceBuffer> for DeviceSlice<'a> {
    fn from(buffer: &'a DeviceBuffer) -> Self {
        Self::new(buffer, 0..buffer.len())
    }
}

/// Consecutive elements of a device buffer, which this value keeps alive: a gradient that lies in a
/// larger buffer.
#[derive(Clone, Debug)]
pub struct DevicePart {
    buffer: Arc<DeviceBuffer>,
    range: Range<usize>,
}

impl DevicePart {
    /// The elements `range` of `buffer`.
    ///
    /// # Panics
    /// If `range` reaches beyond the end, or ends before it starts.
    #[must_use]
    pub fn new(buffer: Arc<DeviceBuffer>, range: Range<usize>) -> Self {
        let range = DeviceSlice::new(&buffer, range).range();
        Self { buffer, range }
    }

    /// Borrows the elements.
    pub(crate) fn slice(&self) -> DeviceSlice<'_> {
        DeviceSlice::new(&self.buffer, self.range.clone())
    }
}

/// The value that keeps foreign memory alive. It is dropped when the library may use the memory
/// again, and leaked if that is never known.
type Owner = Box<dyn Any + Send + Sync>;

/// A piece of device memory that another library owns.
pub(super) struct Foreign {
    pub(super) address: u64,
    pub(super) uses: Uses,
    /// The stream on which the library uses and frees the memory.
    stream: Arc<Stream>,
    owner: Owner,
}

impl Foreign {
    /// Makes the library's stream wait for all operations on the memory, and gives the memory back.
    /// If it is unknown when the device is done with the memory, the library never gets it back.
    pub(super) fn give_back(self) {
        let Self { uses, stream, owner, .. } = self;
        let owner = ManuallyDrop::new(owner);
        if uses.are_lost() {
            return;
        }
        match stream.wait_for(&uses) {
            Ok(()) => drop(ManuallyDrop::into_inner(owner)),
            Err(error) => {
                hsdp_warnings::warn!(%error, "device memory of another library cannot be given back: it is leaked");
            }
        }
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foreign").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl DeviceBuffer {
    /// Makes a buffer of `len` elements of `dtype` in device memory that another library owns and
    /// uses on `stream`. Operations that the library has issued on `stream` so far run before all
    /// operations on the buffer. Operations that it issues after the buffer is dropped run after
    /// them. `owner` keeps the memory alive, and is dropped with the buffer. It is never dropped if
    /// it is unknown when the device is done with the memory: after a call of
    /// [`Stream::enqueue_together`] on the buffer that failed, or an error of the driver.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if the dtype is not f32, f16 or bf16; [`CudaError::Driver`] if a
    /// call of the driver fails.
    ///
    /// # Safety
    /// CU-7: until `owner` is dropped, `address` points to `len` elements of `dtype` in the memory
    /// of the stream's device, aligned to their size. Until then the library does not write them.
    pub unsafe fn foreign(
        stream: &Arc<Stream>,
        dtype: DType,
        len: usize,
        address: u64,
        owner: Owner,
    ) -> Result<Self, CudaError> {
        let uses = Uses::default();
        uses.note_write(&stream.moment()?);
        let foreign = Foreign { address, uses, stream: Arc::clone(stream), owner };
        check_dtype(dtype)?;
        Ok(Self {
            device: stream.device().clone(),
            dtype,
            charge: DeviceCharge::nowhere(),
            len,
            memory: Some(Memory::Lent(Box::new(foreign))),
        })
    }
}
