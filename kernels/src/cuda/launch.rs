//! Launches of kernels, with their arguments.

use std::ffi::c_void;
use std::marker::PhantomData;

use smallvec::SmallVec;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::kernel::Kernel;
use super::stream::{Operation, Stream};
use crate::{Divisor, divisor};

/// The number of threads of a block, except for kernels with a fixed number.
pub(super) const THREADS: u32 = 256;

/// The number of elements that a thread processes at once: `WIDTH` of `number.cuh`.
pub(super) const WIDTH: usize = 4;

/// The largest number of arguments of a kernel.
const MOST_ARGUMENTS: usize = 8;

/// The buffers that a launch reads. With more buffers than these, the list is allocated on the heap.
pub(super) type Reads<'a> = SmallVec<[&'a DeviceBuffer; 16]>;

/// The buffers that a launch writes.
pub(super) type Writes<'a> = SmallVec<[&'a mut DeviceBuffer; 4]>;

/// A plain value that a kernel takes as an argument, with the layout of the type in the kernel's source.
///
/// # Safety
/// CU-3: the type has the size, alignment and meaning of the kernel's parameter in its place.
pub(super) unsafe trait Argument {}

// SAFETY: CU-3, an address, a count and a 32-bit number have the layout of the C++ types.
unsafe impl Argument for u64 {}
// SAFETY: CU-3, as above.
unsafe impl Argument for u32 {}
// SAFETY: CU-3, as above.
unsafe impl Argument for f64 {}

/// `Scale` of `number.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Scale {
    value: f32,
    how: u32,
}

// SAFETY: CU-3, two fields of 4 bytes, as in `number.cuh`.
unsafe impl Argument for Scale {}

impl From<Divisor> for Scale {
    fn from(by: Divisor) -> Self {
        match by.scale() {
            divisor::Scale::None => Self { value: 1.0, how: 0 },
            divisor::Scale::Multiply(reciprocal) => Self { value: reciprocal.0, how: 1 },
            divisor::Scale::Divide(quotient) => Self { value: quotient.0, how: 2 },
        }
    }
}

/// `Note` of `number.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Note {
    pub(super) least: u64,
    pub(super) base: u64,
}

// SAFETY: CU-3, an address and a number of 8 bytes, as in `number.cuh`.
unsafe impl Argument for Note {}

/// A kernel that is about to be launched, with arguments that live for `'a`.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    kernel: Kernel,
    /// The number of elements, or fixed numbers of blocks and threads.
    size: Size,
    arguments: SmallVec<[*mut c_void; MOST_ARGUMENTS]>,
    living: PhantomData<&'a ()>,
}

#[derive(Clone, Copy, Debug)]
enum Size {
    Elements(usize),
    Fixed { blocks: u32, threads: u32 },
}

impl<'a> Launch<'a> {
    /// A launch of `kernel` over `len` elements.
    pub(super) fn over(kernel: Kernel, len: usize) -> Self {
        Self::of(kernel, Size::Elements(len))
    }

    /// A launch of `kernel` with fixed numbers of blocks and threads.
    pub(super) fn fixed(kernel: Kernel, (blocks, threads): (u32, u32)) -> Self {
        Self::of(kernel, Size::Fixed { blocks, threads })
    }

    fn of(kernel: Kernel, size: Size) -> Self {
        Self { kernel, size, arguments: SmallVec::new(), living: PhantomData }
    }

    /// Adds the next argument.
    pub(super) fn argument<A: Argument>(mut self, argument: &'a A) -> Self {
        self.arguments.push(std::ptr::from_ref(argument).cast_mut().cast());
        self
    }

    /// Launches the kernel.
    ///
    /// # Safety
    /// CU-5: the arguments are those of the kernel, in its order. The kernel reads only elements of the buffers that it reads or
    /// writes, and writes only elements of the buffers that it writes.
    pub(super) unsafe fn issue(
        mut self,
        stream: &Stream,
        buffers: (&[&DeviceBuffer], &mut [&mut DeviceBuffer]),
    ) -> Result<(), CudaError> {
        let kernel = stream.device().kernel(self.kernel)?;
        let resident = kernel.resident();
        let (blocks, threads) = match self.size {
            Size::Fixed { blocks, threads } => (blocks, threads),
            Size::Elements(len) => {
                let wanted = len.div_ceil(WIDTH * THREADS as usize);
                (u32::try_from(wanted).unwrap_or(resident).clamp(1, resident), THREADS)
            }
        };
        let arguments = &mut self.arguments;
        // SAFETY: CU-5, the caller's promise is passed on; the arguments are alive, and are copied.
        unsafe { stream.issue(buffers, Operation::Launch { kernel, blocks, threads, arguments }) }?;
        Ok(())
    }
}
