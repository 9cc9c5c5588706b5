//! Tables that kernels take as an argument.

use hsdp_sharding::DType;

use super::launch::Argument;

/// The most parameters of one launch: `MOST_PARAMS` of `pack.cu`.
pub(super) const MOST_PARAMS: usize = 120;

/// The most members of one launch: `MOST_MEMBERS` of `sum.cu`.
pub(super) const MOST_MEMBERS: usize = 480;

/// The most pieces of one launch: `MOST_PIECES` of `update.cu`.
pub(super) const MOST_PIECES: usize = 120;

/// The number of a dtype, and how kernels of its own end.
pub(super) fn dtype(dtype: DType) -> (u32, &'static str) {
    match dtype {
        DType::F16 => (1, "f16"),
        DType::BF16 => (2, "bf16"),
        _ => (0, "f32"),
    }
}

/// Entries of a table, and how many there are: `Params`, `Members` and `Pieces` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Table<T, const MOST: usize> {
    entries: [T; MOST],
    count: u64,
}

// SAFETY: CU-3, an array of entries as the kernel has them, all multiples of 8 bytes, then a count of 8 bytes.
unsafe impl<T: Copy, const MOST: usize> Argument for Table<T, MOST> {}

impl<T: Copy + Default, const MOST: usize> Table<T, MOST> {
    /// # Panics
    /// If there are more than `MOST`.
    pub(super) fn of(entries: &[T]) -> Self {
        let mut table = [T::default(); MOST];
        table[..entries.len()].copy_from_slice(entries);
        Self { entries: table, count: entries.len() as u64 }
    }
}

/// `Param` of `pack.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Param {
    pub(super) address: u64,
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) dtype: u32,
    pub(super) unused: u32,
}

/// `Piece` of `update.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) rate: f32,
    pub(super) second_root: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All arguments of a launch may take 4 KiB together, and those beside a table take 80 bytes at the most.
    #[test]
    fn tables_leave_room_for_other_arguments() {
        assert!(size_of::<Table<Param, MOST_PARAMS>>() <= 4096 - 80);
        assert!(size_of::<Table<u64, MOST_MEMBERS>>() <= 4096 - 80);
        assert!(size_of::<Table<Piece, MOST_PIECES>>() <= 4096 - 80);
    }

    #[test]
    fn entries_are_as_large_as_the_kernels_say() {
        assert_eq!([size_of::<Param>(), size_of::<Piece>()], [32, 24]);
        assert_eq!(size_of::<Table<Piece, 3>>(), 3 * 24 + 8);
    }
}
