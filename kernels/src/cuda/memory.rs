//! Device memory that goes from hand to hand. `CUDA.md`, "Memory".

use std::collections::BTreeMap;
use std::mem;

use cudarc::driver::result;
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use parking_lot::Mutex;

use super::budget::Budget;
use super::device::Device;
use super::error::CudaError;
use super::event::Moment;

/// The least block, in bytes.
const LEAST: usize = 512;

/// From this size on, classes are multiples of it.
const LARGE: usize = 2 << 20;

/// The spare blocks of a device.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// By size.
    classes: Mutex<BTreeMap<usize, Class>>,
    pub(super) budget: Budget,
}

/// The blocks of one size.
#[derive(Debug, Default)]
struct Class {
    spare: Vec<Block>,
    /// How many the driver has been asked for.
    allocations: u64,
}

/// A piece of device memory.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) address: CUdeviceptr,
    /// Its class.
    size: usize,
    pub(super) uses: Uses,
}

/// When memory was last written, and read since.
#[derive(Debug, Default)]
pub(super) struct Uses(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    write: Option<Moment>,
    /// The last of each stream.
    reads: Vec<Moment>,
    is_lost: bool,
}

impl Uses {
    /// Calls `act` with what a reader waits for.
    pub(super) fn written(&self, act: impl FnOnce(&Moment)) {
        if let Some(write) = &self.0.lock().write {
            act(write);
        }
    }

    /// Calls `act` with all that a writer waits for.
    pub(super) fn all(&self, act: impl FnMut(&Moment)) {
        let noted = self.0.lock();
        noted.write.iter().chain(&noted.reads).for_each(act);
    }

    /// It is not known when an operation ends that uses it: nobody may have it again.
    pub(super) fn lose(&self) {
        self.0.lock().is_lost = true;
    }

    /// Whether all have come.
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

    /// A writer has waited for everything before.
    pub(super) fn note_write(&self, moment: &Moment) {
        let mut noted = self.0.lock();
        noted.reads.clear();
        noted.write = Some(moment.clone());
    }
}

impl Pool {
    /// How many blocks that hold `bytes` the driver has been asked for.
    pub(super) fn allocations(&self, bytes: usize) -> u64 {
        self.classes.lock().get(&class(bytes)).map_or(0, |class| class.allocations)
    }

    /// A block of at least `bytes`, which may still be in use: by its uses.
    pub(super) fn take(
        &self,
        device: &Device,
        bytes: usize,
        what: &str,
    ) -> Result<Block, CudaError> {
        let size = class(bytes);
        if let Some(block) = self.spare(size) {
            return Ok(block);
        }
        device.make_current()?;
        let is_out = |error: &result::DriverError| error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let first = self.allocate(size);
        let outcome = if first.as_ref().is_err_and(is_out) {
            self.release(device)?;
            self.allocate(size)
        } else {
            first
        };
        outcome.map_err(|error| match error {
            error if is_out(&error) => exhausted(device, (bytes, what)),
            error => device.refused("allocate memory", error),
        })
    }

    fn spare(&self, size: usize) -> Option<Block> {
        self.classes.lock().get_mut(&size)?.spare.pop()
    }

    fn allocate(&self, size: usize) -> Result<Block, result::DriverError> {
        if !self.budget.take(size) {
            return Err(result::DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        }
        // SAFETY: CU-4, the block that is made of it is given back once, by `release`.
        let address = unsafe { result::malloc_sync(size) };
        let address = address.inspect_err(|_| self.budget.give_back(size))?;
        self.classes.lock().entry(size).or_default().allocations += 1;
        Ok(Block { address, size, uses: Uses::default() })
    }

    pub(super) fn give_back(&self, block: Block) {
        if !block.uses.0.lock().is_lost {
            self.classes.lock().entry(block.size).or_default().spare.push(block);
        }
    }

    /// Gives those spare blocks back to the driver that the device is done with.
    pub(super) fn release(&self, device: &Device) -> Result<(), CudaError> {
        device.make_current()?;
        let spare: Vec<Block> = {
            let mut classes = self.classes.lock();
            classes.values_mut().flat_map(|class| mem::take(&mut class.spare)).collect()
        };
        // The lock is free: others take and give back while the driver works.
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

fn free(device: &Device, block: &Block) -> Result<(), CudaError> {
    // SAFETY: CU-4, it was spare, so nobody holds it; it is forgotten now.
    let freed = unsafe { result::free_sync(block.address) };
    device.0.pool.budget.give_back(block.size);
    freed.map_err(|error| device.refused("free memory", error))
}

/// The size of the block that `bytes` get.
fn class(bytes: usize) -> usize {
    if bytes > LARGE / 2 {
        bytes.next_multiple_of(LARGE)
    } else {
        bytes.max(LEAST).next_power_of_two()
    }
}

/// The error that says that the device has no `bytes` for `what`.
pub(super) fn exhausted(device: &Device, (bytes, what): (usize, &str)) -> CudaError {
    let known = device.make_current().ok().and_then(|()| result::mem_get_info().ok());
    let (free, total) = device.0.pool.budget.within(known.unwrap_or_default());
    CudaError::OutOfMemory { device: device.ordinal(), bytes, what: what.to_owned(), free, total }
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
}
