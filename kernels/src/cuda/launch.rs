//! Launches of kernels, with their arguments: values, tables, and notes that kernels write.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::time::Duration;

use hsdp_sharding::DType;
use smallvec::SmallVec;

use super::buffer::DeviceBuffer;
use super::device::CudaKernel;
use super::error::CudaError;
use super::stream::{DriverCall, Stream};
use crate::{Divisor, Wire, divisor};

/// The number of threads of a block, except for kernels with a fixed number.
pub(super) const THREADS: u32 = 256;

/// The number of elements that a thread processes at once: `WIDTH` of `number.cuh`.
pub(super) const WIDTH: usize = 4;

/// The largest number of arguments of a kernel.
const MOST_ARGUMENTS: usize = 8;

/// The buffers that a launch reads. With more buffers than these, the list is allocated on the
/// heap.
pub(super) type Reads<'a> = SmallVec<[&'a DeviceBuffer; 16]>;

/// The buffers that a launch writes.
pub(super) type Writes<'a> = SmallVec<[&'a mut DeviceBuffer; 4]>;

/// A plain value that a kernel takes as an argument, with the layout of the type in the kernel's
/// source.
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
pub(super) struct ScaleArgument {
    value: f32,
    how: u32,
}

// SAFETY: CU-3, two fields of 4 bytes, as in `number.cuh`.
unsafe impl Argument for ScaleArgument {}

impl From<Divisor> for ScaleArgument {
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
    kernel: CudaKernel,
    /// The number of elements, or fixed numbers of blocks and threads.
    size: LaunchSize,
    arguments: SmallVec<[*mut c_void; MOST_ARGUMENTS]>,
    living: PhantomData<&'a ()>,
}

#[derive(Clone, Copy, Debug)]
enum LaunchSize {
    Elements(usize),
    Fixed { blocks: u32, threads: u32 },
}

impl<'a> Launch<'a> {
    /// A launch of `kernel` over `len` elements.
    pub(super) fn over(kernel: CudaKernel, len: usize) -> Self {
        Self::of(kernel, LaunchSize::Elements(len))
    }

    /// A launch of `kernel` with fixed numbers of blocks and threads.
    pub(super) fn fixed(kernel: CudaKernel, blocks: u32, threads: u32) -> Self {
        Self::of(kernel, LaunchSize::Fixed { blocks, threads })
    }

    fn of(kernel: CudaKernel, size: LaunchSize) -> Self {
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
    /// CU-5: the arguments are those of the kernel, in its order. The kernel reads only elements of
    /// the buffers that it reads or writes, and writes only elements of the buffers that it writes.
    pub(super) unsafe fn issue(
        mut self,
        stream: &Stream,
        reads: &[&DeviceBuffer],
        writes: &mut [&mut DeviceBuffer],
    ) -> Result<(), CudaError> {
        let kernel = stream.device().kernel(self.kernel)?;
        let resident = kernel.resident();
        let (blocks, threads) = match self.size {
            LaunchSize::Fixed { blocks, threads } => (blocks, threads),
            LaunchSize::Elements(len) => {
                let wanted = len.div_ceil(WIDTH * THREADS as usize);
                (u32::try_from(wanted).unwrap_or(resident).clamp(1, resident), THREADS)
            }
        };
        let arguments = &mut self.arguments;
        // SAFETY: CU-5, the caller's promise is passed on; the arguments are alive, and are copied.
        unsafe {
            stream.issue(reads, writes, DriverCall::Launch { kernel, blocks, threads, arguments })
        }?;
        Ok(())
    }
}

/// The most parameters of one launch: `MOST_PARAMS` of `pack.cu`.
pub(super) const MOST_PARAMS: usize = 120;

/// The most members of one launch: `MOST_MEMBERS` of `sum.cu`.
pub(super) const MOST_MEMBERS: usize = 480;

/// The most pieces of one launch: `MOST_PIECES` of `update.cu`.
pub(super) const MOST_PIECES: usize = 120;

/// The dtype of a device buffer as a [`Wire`]: each has one of the three dtypes.
pub(super) fn wire(dtype: DType) -> Wire {
    match dtype {
        DType::F16 => Wire::F16,
        DType::BF16 => Wire::BF16,
        _ => Wire::F32,
    }
}

/// The number of a dtype: `F32`, `F16` and `BF16` of `number.cuh`.
pub(super) fn number(dtype: DType) -> u32 {
    wire(dtype) as u32
}

/// The entries of a table, and their number: `Params`, `Members` and `Pieces` of the kernels.
///
/// Entries beyond the count are not initialized: for a few entries, filling 4 KiB with zeros would
/// take longer than all the rest.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Table<T, const MOST: usize> {
    entries: [MaybeUninit<T>; MOST],
    count: u64,
}

// SAFETY: CU-3, an array of entries as the kernel has them, all multiples of 8 bytes, then a count
// of 8 bytes; the driver copies all of them, and the kernel reads no entry from the count on.
unsafe impl<T: Copy, const MOST: usize> Argument for Table<T, MOST> {}

impl<T: Copy, const MOST: usize> Table<T, MOST> {
    /// # Panics
    /// If there are more than `MOST`.
    pub(super) fn of(entries: impl IntoIterator<Item = T>) -> Self {
        let mut table = Self { entries: [const { MaybeUninit::uninit() }; MOST], count: 0 };
        for (place, entry) in entries.into_iter().enumerate() {
            table.entries[place].write(entry);
            table.count += 1;
        }
        table
    }
}

/// `Param` of `pack.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct TableParam {
    pub(super) address: u64,
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) dtype: u32,
    pub(super) unused: u32,
}

/// `Piece` of `update.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct TablePiece {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) state: u64,
    pub(super) rate: f32,
    pub(super) second_root: f32,
}

/// The number of bits of a note that hold the index. The bits above hold the round.
const INDEX_BITS: u32 = 44;

/// The last round that a note can hold. Later rounds are noted as this one.
const LAST_ROUND: u64 = (1 << (u64::BITS - INDEX_BITS)) - 2;

/// A place in device memory where kernels note the first element that is infinite or NaN: one note
/// for the contributions of a member, and one for its sums.
///
/// The first element is the one of the earliest round, and within a round the one with the least
/// index. Rounds tell apart several sums of one step into the same target, such as those of
/// microbatches.
#[derive(Debug)]
pub struct Noted {
    /// Two u64, as four f32.
    pub(super) words: DeviceBuffer,
}

/// The place and the round of a kernel's note.
#[derive(Debug)]
pub struct Notes<'a> {
    /// The place.
    pub noted: &'a mut Noted,
    /// The round, from 0.
    pub round: usize,
}

/// The first element that is infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FirstFound {
    /// The round in which it was noted, from 0. Rounds above 2^20 - 2 are noted as 2^20 - 2.
    pub round: usize,
    /// Its index in the buffer that the kernel wrote.
    pub index: usize,
}

/// The notes that were read back; `None` if all elements were finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WhatWasNoted {
    /// The note of [`Stream::pack`], on this member's contribution.
    pub contribution: Option<FirstFound>,
    /// The note of [`Stream::sum`], on the target.
    pub sum: Option<FirstFound>,
}

/// The elements that a kernel checks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Of {
    Contribution,
    Sum,
}

impl Noted {
    /// Makes a place without notes, on the device of `stream`.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if the device has no memory left; [`CudaError::Driver`] if a call
    /// of the driver fails.
    pub fn new(stream: &Stream) -> Result<Self, CudaError> {
        let mut noted = Self { words: words(stream, 2, "notes of non-finite elements")? };
        noted.clear(stream)?;
        Ok(noted)
    }

    /// Deletes the notes.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if `stream` is of another device; [`CudaError::Driver`] if a call of
    /// the driver fails.
    pub fn clear(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.words.fill(stream, 0xff)
    }
}

impl Stream {
    /// Copies the notes of each of these places to the host, in their order, and waits for the copy
    /// for at most `patience`.
    ///
    /// # Errors
    /// [`CudaError::Late`] if the copy is not done after `patience`; [`CudaError::Mismatch`] if a
    /// place is on another device; [`CudaError::OutOfMemory`] if the device has no memory left;
    /// [`CudaError::Driver`] if a call of the driver fails, or an operation before the copy has
    /// failed.
    pub fn read_noted(
        &self,
        noted: &[&Noted],
        patience: Duration,
    ) -> Result<Vec<WhatWasNoted>, CudaError> {
        // All notes go into one buffer, so that the host waits once.
        let mut all = words(self, 2 * noted.len(), "notes of non-finite elements")?;
        for (index, noted) in noted.iter().enumerate() {
            all.copy(self, 4 * index..4 * (index + 1), &noted.words, 0..4)?;
        }
        let words = read_words(self, &all, patience)?;
        let both = |pair: &[u64; 2]| WhatWasNoted {
            contribution: first_found(pair[0]),
            sum: first_found(pair[1]),
        };
        Ok(words.as_chunks().0.iter().map(both).collect())
    }
}

/// A buffer for `count` numbers of 8 bytes.
pub(super) fn words(stream: &Stream, count: usize, what: &str) -> Result<DeviceBuffer, CudaError> {
    DeviceBuffer::new(stream.device(), DType::F32, 2 * count, what)
}

/// Copies such a buffer to the host.
pub(super) fn read_words(
    stream: &Stream,
    words: &DeviceBuffer,
    patience: Duration,
) -> Result<Vec<u64>, CudaError> {
    let halves = words.read_back(stream, patience)?.values().to_f32();
    let word = |[low, high]: &[f32; 2]| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
    Ok(halves.as_chunks().0.iter().map(word).collect())
}

/// The argument for the notes of a kernel; with `None` the kernel notes nothing.
pub(super) fn argument(notes: Option<&Notes<'_>>, of: Of) -> Note {
    let Some(Notes { noted, round }) = notes else { return Note { least: 0, base: 0 } };
    let round = LAST_ROUND.min(*round as u64);
    Note { least: noted.words.address(2 * of as usize), base: round << INDEX_BITS }
}

fn first_found(word: u64) -> Option<FirstFound> {
    let number = |part: u64| usize::try_from(part).unwrap_or(usize::MAX);
    let round = number(word >> INDEX_BITS);
    let index = number(word & ((1 << INDEX_BITS) - 1));
    (word != u64::MAX).then_some(FirstFound { round, index })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All arguments of a launch together may take 4 KiB, and the arguments besides a table take at
    /// most 80 bytes.
    #[test]
    fn tables_leave_room_for_other_arguments() {
        assert!(size_of::<Table<TableParam, MOST_PARAMS>>() <= 4096 - 80);
        assert!(size_of::<Table<u64, MOST_MEMBERS>>() <= 4096 - 80);
        assert!(size_of::<Table<TablePiece, MOST_PIECES>>() <= 4096 - 80);
    }

    #[test]
    fn dtypes_have_the_numbers_that_the_kernels_know() {
        assert_eq!([DType::F32, DType::F16, DType::BF16].map(number), [0, 1, 2]);
    }

    #[test]
    #[should_panic(expected = "index out of bounds")]
    fn more_entries_than_there_is_room_for_are_a_mistake() {
        let _ = Table::<u64, 2>::of([1, 2, 3]);
    }

    #[test]
    fn entries_are_as_large_as_the_kernels_say() {
        assert_eq!([size_of::<TableParam>(), size_of::<TablePiece>()], [32, 32]);
        assert_eq!(size_of::<Table<TablePiece, 3>>(), 3 * 32 + 8);
    }

    #[test]
    fn what_comes_in_an_earlier_round_is_less() {
        let word = |round: u64, index: u64| (LAST_ROUND.min(round) << INDEX_BITS) + index;
        assert!(word(0, 1 << 40) < word(1, 0));
        assert!(word(LAST_ROUND, (1 << INDEX_BITS) - 1) < u64::MAX);
        assert_eq!(first_found(word(3, 17)), Some(FirstFound { round: 3, index: 17 }));
        assert_eq!(first_found(u64::MAX), None);
    }
}
