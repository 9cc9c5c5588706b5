//! A pool of the buffers of units that were released, for later gathers.
//!
//! The system zeroes a fresh buffer, page by page, before the gather writes it: one pass more than
//! needed. So a buffer that is no longer used waits here for a parameter of its length and dtype.
//! Lent and waiting buffers together take no more memory than the plan has for `full`. A step that
//! is aborted leaves no buffer here.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Error, HostBuffer};
use hsdp_sharding::{ByteCount, DType, ElemCount};
use parking_lot::Mutex;

/// The pool of one model on one rank.
#[derive(Debug)]
pub(crate) struct FullPool {
    held: Mutex<LoanState>,
}

#[derive(Debug, Default)]
struct LoanState {
    /// The most bytes that are lent and waiting together.
    limit: ByteCount,
    /// Bytes that are lent.
    lent: ByteCount,
    /// Bytes that wait.
    waiting: ByteCount,
    /// Waiting buffers, by size and dtype. An empty list is kept for later: a model has few sizes.
    spare: BTreeMap<BufferKey, Vec<HostBuffer>>,
    /// How often all buffers were released.
    generation: u64,
}

/// The buffers of one gather, on loan: they go back when this is dropped, and count as lent until
/// then.
#[derive(Debug)]
pub(crate) struct Pooled {
    /// Empty while the buffers are elsewhere. The pool loses a buffer that is not back when the
    /// loan ends.
    pub(crate) buffers: Vec<HostBuffer>,
    pool: Arc<FullPool>,
    bytes: ByteCount,
    generation: u64,
}

impl FullPool {
    pub(crate) fn new(limit: ByteCount) -> Self {
        Self { held: Mutex::new(LoanState { limit, ..LoanState::default() }) }
    }

    /// Changes the most bytes that are lent and waiting together.
    pub(crate) fn set_limit(&self, limit: ByteCount) {
        self.held.lock().limit = limit;
    }

    #[cfg(test)]
    pub(crate) fn limit(&self) -> ByteCount {
        self.held.lock().limit
    }

    /// Lends a buffer of `dtype` for each of `lens`, with arbitrary elements.
    ///
    /// # Errors
    /// If there is no memory, even after all waiting buffers were released.
    pub(crate) fn lend(
        self: &Arc<Self>,
        dtype: DType,
        lens: impl Iterator<Item = usize> + Clone,
    ) -> Result<Pooled, Error> {
        let bytes = ElemCount::of(lens.clone().sum()).bytes(dtype);
        let mut pooled = {
            let mut held = self.held.lock();
            held.lent += bytes;
            let found = |len| held.take(BufferKey::of(dtype, len)).unwrap_or_else(missing);
            let found = lens.clone().map(found);
            let buffers = found.collect();
            let limit = held.limit;
            held.shrink_to(limit);
            Pooled { buffers, pool: Arc::clone(self), bytes, generation: held.generation }
        };
        for (buffer, len) in pooled.buffers.iter_mut().zip(lens) {
            if buffer.len() != len {
                *buffer = self.fresh(dtype, len)?;
            }
        }
        Ok(pooled)
    }

    /// Returns a new buffer. If memory is short, the waiting buffers are released first.
    fn fresh(&self, dtype: DType, len: usize) -> Result<HostBuffer, Error> {
        let _full = memory::scope(Category::Full);
        HostBuffer::zeros(dtype, len).or_else(|_| {
            self.held.lock().shrink_to(ByteCount::ZERO);
            HostBuffer::zeros(dtype, len)
        })
    }

    /// Releases all waiting buffers, and those that are lent now as soon as they come back.
    pub(crate) fn let_go(&self) {
        let mut held = self.held.lock();
        held.generation += 1;
        held.shrink_to(ByteCount::ZERO);
    }
}

/// The size and the dtype of a buffer. Smaller buffers come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BufferKey {
    bytes: ByteCount,
    dtype: DType,
}

impl BufferKey {
    /// Returns the key of a buffer of `len` elements.
    fn of(dtype: DType, len: usize) -> Self {
        Self { bytes: ElemCount::of(len).bytes(dtype), dtype }
    }
}

/// Returns an empty buffer, where the pool has no buffer of a parameter.
fn missing() -> HostBuffer {
    HostBuffer::F32(Vec::new())
}

impl LoanState {
    fn take(&mut self, key: BufferKey) -> Option<HostBuffer> {
        let buffer = self.spare.get_mut(&key)?.pop()?;
        self.waiting = self.waiting - buffer.bytes();
        Some(buffer)
    }

    fn put(&mut self, buffer: HostBuffer) {
        self.waiting += buffer.bytes();
        self.spare.entry(BufferKey::of(buffer.dtype(), buffer.len())).or_default().push(buffer);
    }

    /// Releases waiting buffers, the largest first, until lent and waiting bytes together are at
    /// most `limit`.
    fn shrink_to(&mut self, limit: ByteCount) {
        while self.lent + self.waiting > limit {
            let largest = self.spare.iter().rfind(|(_, list)| !list.is_empty());
            let Some(key) = largest.map(|(key, _)| *key) else { return };
            drop(self.take(key));
        }
    }
}

impl AsMut<Vec<HostBuffer>> for Pooled {
    fn as_mut(&mut self) -> &mut Vec<HostBuffer> {
        &mut self.buffers
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let buffers = mem::take(&mut self.buffers);
        let mut held = self.pool.held.lock();
        held.lent = held.lent - self.bytes;
        if held.generation == self.generation {
            let there = buffers.into_iter().filter(|buffer| !buffer.is_empty());
            there.for_each(|buffer| held.put(buffer));
        }
    }
}
