//! The buffers of units that were let go, for the gathers to come.
//!
//! A fresh buffer is zeroed by the system, page by page, before the gather writes it: a pass more than there need be. So a
//! buffer that is not wanted any more waits here for a parameter of its length. What is lent and what waits take no more
//! together than the plan says of `full`; a step that is aborted leaves no buffer here.

use std::collections::BTreeMap;
use std::mem;
use std::ops::Deref;
use std::sync::Arc;

use hsdp_comm::Targets;
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
    /// Lists without buffers.
    lists: Vec<Targets>,
    /// Handles without a loan, of which nobody else has a copy.
    handles: Vec<Arc<Pooled>>,
    /// How often everything was let go.
    generation: u64,
}

/// The buffers of one gather, on loan: they go back when this is dropped, and count as lent until then.
#[derive(Debug)]
pub(crate) struct Pooled {
    /// Empty where a buffer is elsewhere: it is lost to the pool if it is not back in time.
    pub(crate) buffers: Targets,
    loan: Option<Loan>,
}

#[derive(Debug)]
struct Loan {
    pool: Arc<FullPool>,
    bytes: ByteCount,
    generation: u64,
}

/// Buffers that several ranks read. When the last of them is dropped, they go back.
#[derive(Clone, Debug)]
pub(crate) struct SharedPooled(Option<Arc<Pooled>>);

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
        let mut pooled = {
            let mut held = self.held.lock();
            held.lent += bytes;
            let mut buffers = held.lists.pop().unwrap_or_default();
            let found = lens.clone().map(|len| held.take(len).unwrap_or_else(missing));
            buffers.buffers_mut().extend(found);
            held.shrink_to(self.limit);
            let loan = Loan { pool: Arc::clone(self), bytes, generation: held.generation };
            Pooled { buffers, loan: Some(loan) }
        };
        for (buffer, len) in pooled.buffers.iter_mut().zip(lens) {
            if buffer.len() != len {
                *buffer = self.fresh(len)?;
            }
        }
        Ok(pooled)
    }

    /// The same, for several ranks to read: this is the only handle, until there are more.
    ///
    /// # Errors
    /// As those of [`lend`](Self::lend).
    pub(crate) fn lend_shared(
        self: &Arc<Self>,
        lens: impl Iterator<Item = usize> + Clone,
    ) -> Result<Arc<Pooled>, Error> {
        let lent = self.lend(lens)?;
        let handle = self.held.lock().handles.pop();
        let Some(mut handle) = handle else { return Ok(Arc::new(lent)) };
        *Arc::get_mut(&mut handle).expect("nobody has a copy") = lent;
        Ok(handle)
    }

    /// Takes a copy of a handle back; what was lent with it, if it was the last.
    fn take_back(&self, mut shared: Arc<Pooled>) -> Option<Pooled> {
        let mut held = self.held.lock();
        match Arc::get_mut(&mut shared) {
            Some(last) => {
                let lent = last.split_off();
                held.handles.push(shared);
                Some(lent)
            }
            // Another copy may be dropped elsewhere at this moment: then this is the last after all.
            None => Arc::into_inner(shared),
        }
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

/// What stands for a buffer that is not there.
fn missing() -> HostBuffer {
    HostBuffer::F32(Vec::new())
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
        self.loan.as_ref().expect("it is lent").pool.dtype
    }

    /// Ends the loan: the buffers are the caller's from now on.
    pub(crate) fn into_buffers(mut self) -> Vec<HostBuffer> {
        mem::take(&mut self.buffers).into_buffers()
    }

    /// All of it, which leaves nothing.
    fn split_off(&mut self) -> Self {
        Self { buffers: mem::take(&mut self.buffers), loan: self.loan.take() }
    }
}

impl AsMut<Targets> for Pooled {
    fn as_mut(&mut self) -> &mut Targets {
        &mut self.buffers
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let Some(Loan { pool, bytes, generation }) = self.loan.take() else { return };
        let mut buffers = mem::take(&mut self.buffers);
        let mut held = pool.held.lock();
        held.lent = held.lent - bytes;
        if held.generation == generation {
            let there = buffers.buffers_mut().drain(..).filter(|buffer| !buffer.is_empty());
            there.for_each(|buffer| held.put(buffer));
            held.lists.push(buffers);
        }
    }
}

impl From<Arc<Pooled>> for SharedPooled {
    fn from(shared: Arc<Pooled>) -> Self {
        Self(Some(shared))
    }
}

impl Deref for SharedPooled {
    type Target = Pooled;

    fn deref(&self) -> &Pooled {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for SharedPooled {
    fn drop(&mut self) {
        let Some(shared) = self.0.take() else { return };
        let pool = shared.loan.as_ref().map(|loan| Arc::clone(&loan.pool));
        drop(pool.and_then(|pool| pool.take_back(shared)));
    }
}
