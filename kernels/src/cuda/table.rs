//! Tables that kernels take as arguments.

use std::mem::MaybeUninit;

use hsdp_sharding::DType;

use super::launch::Argument;
use crate::Wire;

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
/// Entries beyond the count are not initialized: for a few entries, filling 4 KiB with zeros would take longer than all the rest.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Table<T, const MOST: usize> {
    entries: [MaybeUninit<T>; MOST],
    count: u64,
}

// SAFETY: CU-3, an array of entries as the kernel has them, all multiples of 8 bytes, then a count of 8 bytes; the driver
// copies all of them, and the kernel reads no entry from the count on.
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
pub(super) struct Param {
    pub(super) address: u64,
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) dtype: u32,
    pub(super) unused: u32,
}

/// `Piece` of `update.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) state: u64,
    pub(super) rate: f32,
    pub(super) second_root: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All arguments of a launch together may take 4 KiB, and the arguments besides a table take at most 80 bytes.
    #[test]
    fn tables_leave_room_for_other_arguments() {
        assert!(size_of::<Table<Param, MOST_PARAMS>>() <= 4096 - 80);
        assert!(size_of::<Table<u64, MOST_MEMBERS>>() <= 4096 - 80);
        assert!(size_of::<Table<Piece, MOST_PIECES>>() <= 4096 - 80);
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
        assert_eq!([size_of::<Param>(), size_of::<Piece>()], [32, 32]);
        assert_eq!(size_of::<Table<Piece, 3>>(), 3 * 32 + 8);
    }
}
