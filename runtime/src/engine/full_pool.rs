//! The buffers of units that were let go, for the gathers to come.
//!
//! A fresh buffer is zeroed by the system, page by page, before the gather writes it: a pass more than there need be. So a
//! buffer that is not wanted any more waits here for a parameter of its length. What is lent and what waits take no more
//! together than the plan says of `full`; a step that is aborted leaves nothing here.

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
    dtype: DType,
    /// The most that is lent and waits together.
    limit: ByteCount,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    /// Bytes that are lent.
    lent: ByteCount,
    /// Bytes that wait.
    waiting: ByteCount,
    /// What waits, by length. A list that is empty will be used again: a model has few lengths.
    spare: BTreeMap<usize, Vec<HostBuffer>>,
    /// How often everything was let go.
    generation: u64,
}

/// The buffers of one gather, on loan: they go back when this is dropped, and count as lent until then.
#[derive(Debug)]
pub(crate) struct Pooled {
    /// Empty where a buffer is elsewhere: it is lost to the pool if it is not back in time.
    pub(crate) buffers: Vec<HostBuffer>,
    pool: Arc<FullPool>,
    bytes: ByteCount,
    generation: u64,
}

impl FullPool {
    pub(crate) fn new(dtype: DType, limit: ByteCount) -> Self {
        Self { dtype, limit, held: Mutex::default() }
    }

    /// A buffer for each of `lens`, with elements that mean nothing.
    ///
    /// # Errors
    /// If there is no memory, though nothing waits here any more.
    pub(crate) fn lend(
        self: &Arc<Self>,
        lens: impl Iterator<Item = usize> + Clone,
    ) -> Result<Pooled, Error> {
        let bytes = self.bytes(lens.clone().sum());
        let (found, generation) = {
            let mut held = self.held.lock();
            held.lent += bytes;
            let found: Vec<_> = lens.clone().map(|len| held.take(len)).collect();
            held.shrink_to(self.limit);
            (found, held.generation)
        };
        let mut pooled = Pooled { buffers: Vec::new(), pool: Arc::clone(self), bytes, generation };
        let buffers = found.into_iter().zip(lens).map(|(found, len)| match found {
            Some(buffer) => Ok(buffer),
            None => self.fresh(len),
        });
        pooled.buffers = buffers.collect::<Result<_, _>>()?;
        Ok(pooled)
    }

    /// A buffer that nobody has used; if need be, in the room of those that wait.
    fn fresh(&self, len: usize) -> Result<HostBuffer, Error> {
        let _full = memory::scope(Category::Full);
        HostBuffer::zeros(self.dtype, len).or_else(|_| {
            self.held.lock().shrink_to(ByteCount::ZERO);
            HostBuffer::zeros(self.dtype, len)
        })
    }

    /// Lets go of all that waits, and of what is lent now, as soon as it comes back.
    pub(crate) fn let_go(&self) {
        let mut held = self.held.lock();
        held.generation += 1;
        held.shrink_to(ByteCount::ZERO);
    }

    fn bytes(&self, len: usize) -> ByteCount {
        ElemCount::of(len).bytes(self.dtype)
    }
}

impl Held {
    fn take(&mut self, len: usize) -> Option<HostBuffer> {
        let buffer = self.spare.get_mut(&len)?.pop()?;
        self.waiting = self.waiting - buffer.bytes();
        Some(buffer)
    }

    fn put(&mut self, buffer: HostBuffer) {
        self.waiting += buffer.bytes();
        self.spare.entry(buffer.len()).or_default().push(buffer);
    }

    /// Lets go of what waits, the longest first, until it fits below `limit` with what is lent.
    fn shrink_to(&mut self, limit: ByteCount) {
        while self.lent + self.waiting > limit {
            let longest = self.spare.iter().rfind(|(_, list)| !list.is_empty());
            let Some(len) = longest.map(|(len, _)| *len) else { return };
            drop(self.take(len));
        }
    }
}

impl Pooled {
    pub(crate) fn dtype(&self) -> DType {
        self.pool.dtype
    }

    /// Ends the loan: the buffers are the caller's from now on.
    pub(crate) fn into_buffers(mut self) -> Vec<HostBuffer> {
        mem::take(&mut self.buffers)
    }
}

impl AsMut<Vec<HostBuffer>> for Pooled {
    fn as_mut(&mut self) -> &mut Vec<HostBuffer> {
        &mut self.buffers
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let mut held = self.pool.held.lock();
        held.lent = held.lent - self.bytes;
        if held.generation == self.generation {
            let there = self.buffers.drain(..).filter(|buffer| !buffer.is_empty());
            there.for_each(|buffer| held.put(buffer));
        }
    }
}
