//! Device memory that goes from hand to hand. `CUDA.md`, "Memory".

use std::collections::BTreeMap;
use std::mem;

use cudarc::driver::result;
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use parking_lot::Mutex;

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
}

impl Uses {
    /// Calls `wait` with what a reader waits for.
    pub(super) fn written(
        &self,
        wait: impl FnOnce(&Moment) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.0.lock().write.as_ref().map_or(Ok(()), wait)
    }

    /// Calls `wait` with all that a writer waits for.
    pub(super) fn all(
        &self,
        wait: impl FnMut(&Moment) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let noted = self.0.lock();
        noted.write.iter().chain(&noted.reads).try_for_each(wait)
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
        device.bind()?;
        match self.allocate(size) {
            Err(error) if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                self.release(device)?;
                self.allocate(size).map_err(|error| exhausted(device, error, (bytes, what)))
            }
            outcome => outcome.map_err(|error| device.refused("allocate memory", error)),
        }
    }

    fn spare(&self, size: usize) -> Option<Block> {
        self.classes.lock().get_mut(&size)?.spare.pop()
    }

    fn allocate(&self, size: usize) -> Result<Block, result::DriverError> {
        // SAFETY: CU-4, the block that is made of it is given back once, by `release`.
        let address = unsafe { result::malloc_sync(size) }?;
        self.classes.lock().entry(size).or_default().allocations += 1;
        Ok(Block { address, size, uses: Uses::default() })
    }

    pub(super) fn give_back(&self, block: Block) {
        self.classes.lock().entry(block.size).or_default().spare.push(block);
    }

    /// Gives what is spare back to the driver, which waits until the device is done with it.
    pub(super) fn release(&self, device: &Device) -> Result<(), CudaError> {
        let mut classes = self.classes.lock();
        for block in classes.values_mut().flat_map(|class| mem::take(&mut class.spare)) {
            // SAFETY: CU-4, nobody holds it: it was spare.
            let freed = unsafe { result::free_sync(block.address) };
            freed.map_err(|error| device.refused("free memory", error))?;
        }
        Ok(())
    }
}

/// The size of the block that `bytes` get.
fn class(bytes: usize) -> usize {
    if bytes > LARGE / 2 {
        bytes.next_multiple_of(LARGE)
    } else {
        bytes.max(LEAST).next_power_of_two()
    }
}

fn exhausted(
    device: &Device,
    error: result::DriverError,
    (bytes, what): (usize, &str),
) -> CudaError {
    if error.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return device.refused("allocate memory", error);
    }
    let (free, total) = result::mem_get_info().unwrap_or_default();
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
