//! How a kernel gets its arguments.

use std::ffi::c_void;
use std::marker::PhantomData;

use cudarc::driver::result;
use smallvec::SmallVec;

use super::buffer::DeviceBuffer;
use super::device::Loaded;
use super::error::CudaError;
use super::source::Kernel;
use super::stream::Stream;
use crate::{Divisor, divisor};

/// Threads of a block, but for kernels that fix theirs.
pub(super) const THREADS: u32 = 256;

/// Elements that a thread takes at once: `WIDTH` of `number.cuh`.
pub(super) const WIDTH: usize = 4;

/// As many arguments as any kernel has.
const MOST_ARGUMENTS: usize = 8;

/// Buffers that a launch reads: of a unit with more parameters than these, the list is allocated.
pub(super) type Reads<'a> = SmallVec<[&'a DeviceBuffer; 16]>;

/// Buffers that a launch writes.
pub(super) type Writes<'a> = SmallVec<[&'a mut DeviceBuffer; 4]>;

/// A value that a kernel takes as an argument: plain, and laid out as the kernel's source says.
///
/// # Safety
/// CU-3: the type has the size, alignment and meaning of the kernel's parameter in its place.
pub(super) unsafe trait Argument {}

// SAFETY: CU-3, an address, a count, and a number of 32 bits are what C++ has under these names.
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
    /// Elements that it goes over, or the blocks and threads that it fixes.
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
    /// Of `kernel`, over `len` elements.
    pub(super) fn over(kernel: Kernel, len: usize) -> Self {
        Self::of(kernel, Size::Elements(len))
    }

    /// Of `kernel`, with so many blocks and threads, which it fixes.
    pub(super) fn fixed(kernel: Kernel, (blocks, threads): (u32, u32)) -> Self {
        Self::of(kernel, Size::Fixed { blocks, threads })
    }

    fn of(kernel: Kernel, size: Size) -> Self {
        Self { kernel, size, arguments: SmallVec::new(), living: PhantomData }
    }

    /// The next argument.
    pub(super) fn argument<A: Argument>(mut self, argument: &'a A) -> Self {
        self.arguments.push(std::ptr::from_ref(argument).cast_mut().cast());
        self
    }

    /// Launches it.
    ///
    /// # Safety
    /// CU-5: the arguments are the kernel's, in its order; what it reads lies in `reads` and `writes`, and what it writes in
    /// `writes`, within their elements.
    pub(super) unsafe fn issue(
        mut self,
        stream: &Stream,
        buffers: (&[&DeviceBuffer], &mut [&mut DeviceBuffer]),
    ) -> Result<(), CudaError> {
        let Loaded { function, resident } = stream.device().kernel(self.kernel)?;
        let (blocks, threads) = match self.size {
            Size::Fixed { blocks, threads } => (blocks, threads),
            Size::Elements(len) => {
                let wanted = len.div_ceil(WIDTH * THREADS as usize);
                (u32::try_from(wanted).unwrap_or(resident).clamp(1, resident), THREADS)
            }
        };
        let (grid, block) = ((blocks, 1, 1), (threads, 1, 1));
        stream.issue(self.kernel.name(), buffers, |raw| {
            // SAFETY: CU-5, the caller's promise is passed on; the arguments live, and are copied.
            unsafe { result::launch_kernel(function.0, grid, block, 0, raw, &mut self.arguments) }
        })?;
        Ok(())
    }
}
