//! The pool of device memory, whose blocks go from one buffer to the next; its budget; and
//! page-locked memory of the host for copies. `CUDA.md`, "Memory".

use std::collections::BTreeMap;
use std::{mem, slice};

use parking_lot::Mutex;

use super::device::{Device, Handle};
use super::error::CudaError;
use super::stream::Moment;

/// The size of the smallest block, in bytes.
const LEAST: usize = 512;

/// From this size on, classes are multiples of it.
const LARGE: usize = 2 << 20;

/// The spare blocks of a device.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// The classes, by the size of their blocks.
    classes: Mutex<BTreeMap<usize, Class>>,
    pub(super) budget: Budget,
}

/// The blocks of one size.
#[derive(Debug, Default)]
struct Class {
    spare: Vec<MemoryBlock>,
    /// The number of blocks that were allocated from the driver.
    allocations: u64,
}

/// A piece of device memory.
#[derive(Debug)]
pub(super) struct MemoryBlock {
    pub(super) address: u64,
    /// The size of its class, in bytes.
    size: usize,
    pub(super) uses: Uses,
}

/// The moment at which a piece of memory was last written, and the moments at which it was read
/// since.
#[derive(Debug, Default)]
pub(super) struct Uses(Mutex<UsesNoted>);

#[derive(Debug, Default)]
struct UsesNoted {
    write: Option<Moment>,
    /// The last read of each stream.
    reads: Vec<Moment>,
    is_lost: bool,
}

impl Uses {
    /// Calls `act` with the moment for which a reader must wait.
    pub(super) fn written(&self, act: impl FnOnce(&Moment)) {
        if let Some(write) = &self.0.lock().write {
            act(write);
        }
    }

    /// Calls `act` with each moment for which a writer must wait.
    pub(super) fn all(&self, act: impl FnMut(&Moment)) {
        let noted = self.0.lock();
        noted.write.iter().chain(&noted.reads).for_each(act);
    }

    /// Marks the memory as lost: the end of an operation that uses it is unknown, so it must never
    /// be used again.
    pub(super) fn lose(&self) {
        self.0.lock().is_lost = true;
    }

    /// Returns whether the memory is lost.
    pub(super) fn are_lost(&self) -> bool {
        self.0.lock().is_lost
    }

    /// Whether the device has reached all of these moments.
    fn have_come(&self) -> Result<bool, CudaError> {
        let noted = self.0.lock();
        for moment in noted.write.iter().chain(&noted.reads) {
            if !moment.has_come()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn note_read(&self, moment: &Moment) {
        let mut noted = self.0.lock();
        noted.reads.retain(|read| read.stream != moment.stream);
        noted.reads.push(moment.clone());
    }

    /// Notes a write. It replaces all earlier uses, because the writer has waited for them.
    pub(super) fn note_write(&self, moment: &Moment) {
        let mut noted = self.0.lock();
        noted.reads.clear();
        noted.write = Some(moment.clone());
    }
}

impl Pool {
    /// The number of blocks that were allocated from the driver in the size class of `bytes`.
    pub(super) fn allocations(&self, bytes: usize) -> u64 {
        self.classes.lock().get(&class(bytes)).map_or(0, |class| class.allocations)
    }

    /// Takes a block of at least `bytes`. Operations may still use it: its uses say which.
    pub(super) fn take(
        &self,
        device: &Device,
        bytes: usize,
        what: &str,
    ) -> Result<MemoryBlock, CudaError> {
        let size = class(bytes);
        if let Some(block) = self.spare(size) {
            return Ok(block);
        }
        device.make_current()?;
        let mut block = self.allocate(device, size)?;
        if block.is_none() {
            self.release(device)?;
            block = self.allocate(device, size)?;
        }
        block.ok_or_else(|| exhausted(device, bytes, what))
    }

    fn spare(&self, size: usize) -> Option<MemoryBlock> {
        self.classes.lock().get_mut(&size)?.spare.pop()
    }

    /// A new block; `None` if the device or the budget has no room.
    fn allocate(&self, device: &Device, size: usize) -> Result<Option<MemoryBlock>, CudaError> {
        if !self.budget.take(size) {
            return Ok(None);
        }
        // SAFETY: CU-4, the memory belongs to one block, which `release` gives back once.
        let address = unsafe { device.context().allocate(size) };
        let Ok(Some(address)) = address else {
            self.budget.give_back(size);
            return address.map(|_| None);
        };
        self.classes.lock().entry(size).or_default().allocations += 1;
        Ok(Some(MemoryBlock { address, size, uses: Uses::default() }))
    }

    pub(super) fn give_back(&self, block: MemoryBlock) {
        if !block.uses.are_lost() {
            self.classes.lock().entry(block.size).or_default().spare.push(block);
        }
    }

    /// Frees the spare blocks that the device is done with.
    pub(super) fn release(&self, device: &Device) -> Result<(), CudaError> {
        device.make_current()?;
        let spare: Vec<MemoryBlock> = {
            let mut classes = self.classes.lock();
            classes.values_mut().flat_map(|class| mem::take(&mut class.spare)).collect()
        };
        // The lock is released, so other threads can take and give back blocks while the driver
        // frees memory.
        let mut outcome = Ok(());
        for block in spare {
            match block.uses.have_come() {
                Ok(true) => outcome = outcome.and(free(device, &block)),
                Ok(false) => self.give_back(block),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }
}

fn free(device: &Device, block: &MemoryBlock) -> Result<(), CudaError> {
    // SAFETY: CU-4, the block was spare, so no buffer holds it; it is dropped now.
    let freed = unsafe { device.context().free(block.address) };
    device.shared().pool.budget.give_back(block.size);
    freed
}

/// The size of the block for an allocation of `bytes`.
fn class(bytes: usize) -> usize {
    if bytes > LARGE / 2 {
        bytes.next_multiple_of(LARGE)
    } else {
        bytes.max(LEAST).next_power_of_two()
    }
}

/// The error that the device has no `bytes` left for `what`.
pub(super) fn exhausted(device: &Device, bytes: usize, what: &str) -> CudaError {
    let (free, total) = device.context().memory();
    let (free, total) = device.shared().pool.budget.within(free, total);
    CudaError::OutOfMemory { device: device.ordinal(), bytes, what: what.to_owned(), free, total }
}

/// The bytes that a pool has allocated from the driver, and their limit.
#[derive(Debug)]
pub(super) struct Budget(Mutex<Bytes>);

#[derive(Debug)]
struct Bytes {
    taken: usize,
    limit: usize,
}

/// Only the memory of the device limits the pool.
impl Default for Budget {
    fn default() -> Self {
        Self(Mutex::new(Bytes { taken: 0, limit: usize::MAX }))
    }
}

impl Budget {
    pub(super) fn limit(&self, bytes: usize) {
        self.0.lock().limit = bytes;
    }

    /// Counts `bytes` as taken if they are within the limit. Returns whether they are.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let mut held = self.0.lock();
        let fits = bytes <= held.limit.saturating_sub(held.taken);
        held.taken += if fits { bytes } else { 0 };
        fits
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.0.lock().taken -= bytes;
    }

    /// Applies the limit to the free and total bytes that the device reports.
    pub(super) fn within(&self, free: usize, total: usize) -> (usize, usize) {
        let held = self.0.lock();
        (free.min(held.limit.saturating_sub(held.taken)), total.min(held.limit))
    }
}

/// The spare pieces of a device, each with the end of its last copy.
#[derive(Debug, Default)]
pub(super) struct Stagings(Mutex<Vec<(StagingPiece, Option<Moment>)>>);

/// Page-locked bytes.
#[derive(Debug)]
struct StagingPiece {
    start: Handle<*mut u8>,
    len: usize,
}

/// Page-locked bytes that one copy uses.
#[derive(Debug)]
pub(super) struct Staging {
    device: Device,
    /// `Some` until it is dropped.
    piece: Option<StagingPiece>,
    /// The end of the copy, if the host does not wait for it.
    until: Option<Moment>,
}

impl Staging {
    /// Takes a piece of at least `len` bytes that no copy uses.
    pub(super) fn take(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.make_current()?;
        let piece = device.shared().stagings.spare(len)?;
        let piece = piece.map_or_else(|| StagingPiece::new(device, len), Ok)?;
        Ok(Self { device: device.clone(), piece: Some(piece), until: None })
    }

    /// The bytes.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let StagingPiece { start, len } = self.piece.as_ref().expect("present until it is dropped");
        // SAFETY: CU-6, the piece is page-locked memory of this length, zeroed when it was made,
        // and this is its only owner.
        unsafe { slice::from_raw_parts_mut(start.0, *len) }
    }

    /// Returns the piece, which is in use until `moment`.
    pub(super) fn until(mut self, moment: Moment) {
        self.until = Some(moment);
    }

    /// Leaks the piece, because a copy that was not done in time may still write it.
    pub(super) fn leak(mut self) {
        self.piece = None;
    }
}

impl StagingPiece {
    fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        let len = len.max(4096).next_power_of_two();
        let start = device.context().lock_pages(len)?;
        // SAFETY: CU-6, there are `len` bytes from `start`, and they have no other user.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { start: Handle(start), len })
    }
}

impl Stagings {
    /// The smallest spare piece that is large enough and not in use.
    fn spare(&self, len: usize) -> Result<Option<StagingPiece>, CudaError> {
        let mut spare = self.0.lock();
        let mut found: Option<usize> = None;
        for (index, (piece, until)) in spare.iter().enumerate() {
            let is_better = found.is_none_or(|other| piece.len < spare[other].0.len);
            if piece.len >= len && is_better && until.as_ref().map_or(Ok(true), Moment::has_come)? {
                found = Some(index);
            }
        }
        Ok(found.map(|index| spare.swap_remove(index).0))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            self.device.shared().stagings.0.lock().push((piece, self.until.take()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_holds_what_asked_for_it_and_wastes_less_than_half() {
        for bytes in [0, 1, 511, 512, 513, 4096, 1 << 20, (1 << 20) + 1, 3 << 20, 5_000_000_000] {
            let size = class(bytes);
            assert!(size >= bytes);
            assert!(size <= LEAST || size < 2 * bytes, "{bytes} bytes in {size}");
            assert!(size <= LARGE || size - bytes < LARGE, "{bytes} bytes in {size}");
            assert!(size.is_multiple_of(LEAST));
        }
    }

    #[test]
    fn no_more_is_taken_than_may_be() {
        let budget = Budget::default();
        assert!(budget.take(1 << 40));
        budget.give_back(1 << 40);
        budget.limit(100);
        assert!(budget.take(60) && !budget.take(41) && budget.take(40));
        assert_eq!(budget.within(500, 1000), (0, 100));
        budget.give_back(60);
        assert_eq!(budget.within(50, 80), (50, 80));
        budget.limit(10);
        assert!(!budget.take(1), "more is taken already than may be");
    }
}
