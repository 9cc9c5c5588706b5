//! Memory for messages: aligned for every element, and used again.

use std::sync::Arc;
use std::{fmt, mem};

use bytemuck::{Pod, Zeroable};

use crate::sync::Mutex;

/// Lengths of messages are multiples of this: a line of a cache, and more than any element's alignment.
pub(crate) const BLOCK_BYTES: usize = 64;

/// How many bytes of free buffers are kept: as much as a step has under way at once.
const KEPT_BYTES: usize = 1 << 30;

/// Bytes that lie so that they can be read as elements.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(C, align(64))]
struct PooledBlock([u8; BLOCK_BYTES]);

/// Bytes of a message. Their memory goes back to where it came from.
pub(crate) struct Buffer {
    blocks: Vec<PooledBlock>,
    pool: Arc<BufferPool>,
}

/// Buffers that are free.
#[derive(Default)]
pub(crate) struct BufferPool(Mutex<FreeBlocks>);

#[derive(Default)]
struct FreeBlocks {
    buffers: Vec<Vec<PooledBlock>>,
    bytes: usize,
}

impl BufferPool {
    /// A buffer of so many bytes, rounded up to blocks, of any content. `None` if there is no memory.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Option<Buffer> {
        let count = bytes.div_ceil(BLOCK_BYTES);
        let blocks = match self.0.lock().take(count) {
            Some(mut blocks) => {
                // Longer than it is to be, or it was made anew: elements that are there are left as they are.
                blocks.resize(count, PooledBlock::zeroed());
                blocks
            }
            None => bytemuck::allocation::try_zeroed_vec(count).ok()?,
        };
        Some(Buffer { blocks, pool: Arc::clone(self) })
    }
}

impl FreeBlocks {
    /// The smallest that has room, unless that would waste most of it.
    fn take(&mut self, count: usize) -> Option<Vec<PooledBlock>> {
        let fits =
            |blocks: &Vec<PooledBlock>| (count..=4 * count.max(16)).contains(&blocks.capacity());
        let fitting = self.buffers.iter().enumerate().filter(|(_, blocks)| fits(blocks));
        let (place, _) = fitting.min_by_key(|(_, blocks)| blocks.capacity())?;
        let blocks = self.buffers.swap_remove(place);
        self.bytes -= blocks.capacity() * BLOCK_BYTES;
        Some(blocks)
    }

    fn put(&mut self, blocks: Vec<PooledBlock>) {
        let bytes = blocks.capacity() * BLOCK_BYTES;
        if self.bytes + bytes <= KEPT_BYTES {
            self.bytes += bytes;
            self.buffers.push(blocks);
        }
    }
}

impl Buffer {
    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.blocks)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.blocks)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.0.lock().put(mem::take(&mut self.blocks));
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_buffer_serves_the_next_that_fits() {
        let pool = Arc::<BufferPool>::default();
        let mut first = pool.take(100).expect("there is memory");
        assert_eq!(first.bytes().len(), 128);
        first.bytes_mut().fill(7);
        let address = first.bytes().as_ptr();
        assert!(address.addr().is_multiple_of(BLOCK_BYTES));
        let other = pool.take(100).expect("there is memory");
        assert_ne!(other.bytes().as_ptr(), address);
        drop(first);
        let again = pool.take(60).expect("there is memory");
        assert_eq!((again.bytes().as_ptr(), again.bytes().len()), (address, 64));
    }

    #[test]
    fn a_small_message_takes_no_large_buffer() {
        let pool = Arc::<BufferPool>::default();
        let large = pool.take(1 << 20).expect("there is memory");
        let address = large.bytes().as_ptr();
        drop(large);
        assert_ne!(pool.take(64).expect("there is memory").bytes().as_ptr(), address);
        assert_eq!(pool.take(1 << 19).expect("there is memory").bytes().as_ptr(), address);
    }
}
