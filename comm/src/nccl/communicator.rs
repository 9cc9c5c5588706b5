//! A communicator, from its making to its end; the id by which its ranks find each other, and the
//! time for which they wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use hsdp_kernels::cuda::{Apart, Device};
use nccl_sys::{Nccl, ncclComm, ncclComm_t, ncclResult_t, ncclUniqueId};

use super::NcclError;
use crate::error::nccl::texts;

/// The sleep of a waiting thread between two looks.
pub(super) const LOOK: Duration = Duration::from_micros(50);

/// A rank's handle of a communicator. One thread at a time can use it.
///
/// Every operation is **collective**: all ranks issue the same operations in the same order.
/// Dropping it aborts the communicator; [`close`](Self::close) ends it in order.
#[derive(Debug)]
pub struct Communicator {
    pub(super) nccl: &'static Nccl,
    /// There until it is given up.
    raw: Option<RawCommunicator>,
    pub(super) device: Device,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Of each call that may be in progress for some time.
    pub(super) patience: Patience,
}

/// A pointer, so it is not `Sync`: a communicator is used by one thread at a time.
#[derive(Clone, Copy, Debug)]
struct RawCommunicator(ncclComm_t);

/// The memory for a handle. NCCL writes it from a thread of its own, maybe when no thread waits for
/// it any more. So it is never freed: 8 bytes for each communicator that is made.
struct HandleCell(&'static AtomicPtr<ncclComm>);

impl HandleCell {
    fn new() -> Self {
        Self(Box::leak(Box::new(AtomicPtr::new(std::ptr::null_mut()))))
    }

    fn address(&self) -> *mut ncclComm_t {
        self.0.as_ptr()
    }

    /// The handle, if it was written so far.
    fn taken(&self) -> Option<RawCommunicator> {
        let raw = self.0.load(Ordering::Acquire);
        (!raw.is_null()).then_some(RawCommunicator(raw))
    }
}

// SAFETY: NC-4, a communicator may go from thread to thread; that one uses it at a time is in the
// type that owns it.
unsafe impl Send for RawCommunicator {}

impl Communicator {
    /// Joins the communicator of `id`, on `device`, as the rank that `place` names: `(rank, size)`.
    /// **Collective.** Its later calls have the same patience.
    ///
    /// # Errors
    /// [`NcclError::Late`] if not all ranks have joined in time; [`NcclError::Missing`] if NCCL
    /// cannot be loaded; [`NcclError::Refused`]; [`NcclError::Device`].
    pub fn join(
        device: &Device,
        id: UniqueId,
        rank: usize,
        size: usize,
        patience: Patience,
    ) -> Result<Self, NcclError> {
        let nccl = load()?;
        device.make_current()?;
        let number = of(rank);
        let count = of(size);
        let mut config = nccl.config();
        config.blocking = 0;
        let cell = HandleCell::new();
        // SAFETY: NC-4, it writes a handle to its cell, now or later, and reads id and config
        // before it returns.
        let status = unsafe {
            (nccl.functions().ncclCommInitRankConfig)(
                cell.address(),
                count,
                id.raw(),
                number,
                &raw mut config,
            )
        };
        let raw = cell.taken();
        let device = device.clone();
        let joined = Self { nccl, raw, device, rank, size, patience };
        joined.settle("join", status, Instant::now())?;
        Ok(joined)
    }

    /// Splits the communicator: all ranks with the same color get a communicator of their own,
    /// ordered by `key` and rank. **Collective** over this communicator.
    ///
    /// # Errors
    /// [`NcclError::Late`], [`NcclError::Refused`], [`NcclError::GivenUp`], [`NcclError::Device`].
    /// If NCCL does not complete the split, this communicator is aborted.
    pub fn split(&mut self, color: usize, key: usize) -> Result<Self, NcclError> {
        let raw = self.raw("split")?;
        self.device.make_current()?;
        let mut config = self.nccl.config();
        config.blocking = 0;
        let cell = HandleCell::new();
        let apart = Apart::begin();
        // SAFETY: NC-4, the parent lives; a handle is written to its cell, now or later.
        let status = unsafe {
            (self.nccl.functions().ncclCommSplit)(
                raw,
                of(color),
                of(key),
                cell.address(),
                &raw mut config,
            )
        };
        drop(apart);
        if let Err(error) = self.settle("split", begun(status), Instant::now()) {
            // Neither it nor the new one can be used: NCCL is in the midst of it.
            self.give_up();
            return Err(error);
        }
        let nccl = self.nccl;
        let raw = cell.taken();
        let device = self.device.clone();
        let patience = self.patience.clone();
        let mut split = Self { nccl, raw, device, rank: 0, size: 0, patience };
        split.settle("split", ncclResult_t::ncclInProgress, Instant::now())?;
        let functions = nccl.functions();
        split.rank = split.asked("rank", functions.ncclCommUserRank)?;
        split.size = split.asked("size", functions.ncclCommCount)?;
        Ok(split)
    }

    /// This rank's number in the communicator.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Waits until all issued operations are done, for `limit` at most, and destroys the
    /// communicator. **Collective.** After an error, its drop aborts it.
    ///
    /// # Errors
    /// [`NcclError::Late`] after `limit`; [`NcclError::Refused`]; [`NcclError::GivenUp`];
    /// [`NcclError::Device`].
    pub fn close(&mut self, limit: Duration) -> Result<(), NcclError> {
        let raw = self.raw("close")?;
        self.device.make_current()?;
        self.patience.limit = limit;
        // NCCL waits for what this rank has issued, and not until the other ranks close, too.
        let _frees_memory = Apart::begin();
        // SAFETY: NC-4, the communicator lives, and nothing is issued on it any more.
        let status = unsafe { (self.nccl.functions().ncclCommFinalize)(raw) };
        self.settle("close", status, Instant::now())?;
        self.raw = None;
        // SAFETY: NC-4, it was finalized, and `raw` is forgotten.
        let status = unsafe { (self.nccl.functions().ncclCommDestroy)(raw) };
        match status {
            ncclResult_t::ncclSuccess => Ok(()),
            status => Err(self.refused("close", status)),
        }
    }

    /// Aborts the communicator, by a thread of its own that first waits until no other thread is in
    /// the midst of issuing calls of several ranks. Its operations end, and those of the other
    /// ranks hang until they abort theirs. Returns at once.
    pub fn give_up(&mut self) {
        let Some(raw) = self.raw.take() else { return };
        let abort = self.nccl.functions().ncclCommAbort;
        let device = self.device.clone();
        let abort = move || {
            // The whole of it is moved here, not the pointer in it.
            let raw = raw;
            if device.make_current().is_err() {
                return;
            }
            let _frees_memory = Apart::begin();
            // SAFETY: NC-4, this thread alone has the handle: it was taken.
            let status = unsafe { abort(raw.0) };
            if status != ncclResult_t::ncclSuccess {
                hsdp_warnings::warn!(%status, "NCCL could not abort a communicator");
            }
        };
        // It may wait for the device, which a drop must not.
        let started = thread::Builder::new().name("hsdp-nccl-abort".to_owned()).spawn(abort);
        if let Err(error) = started {
            hsdp_warnings::warn!(%error, "a communicator could not be aborted: its thread could not be started");
        }
    }

    /// The handle.
    pub(super) fn raw(&self, operation: &'static str) -> Result<ncclComm_t, NcclError> {
        let given_up = NcclError::GivenUp { operation, rank: self.rank, size: self.size };
        self.raw.map(|raw| raw.0).ok_or(given_up)
    }

    /// Waits until a call that began at `began`, and may be in progress, is not any more.
    pub(super) fn settle(
        &self,
        operation: &'static str,
        status: ncclResult_t,
        began: Instant,
    ) -> Result<(), NcclError> {
        match status {
            ncclResult_t::ncclSuccess => return Ok(()),
            ncclResult_t::ncclInProgress => {}
            status => return Err(self.refused(operation, status)),
        }
        while self.state(operation)? == ncclResult_t::ncclInProgress {
            self.check_patience(operation, began)?;
            look_later();
        }
        Ok(())
    }

    /// Late, if a call that began at `began` is not waited for any more.
    pub(super) fn check_patience(
        &self,
        operation: &'static str,
        began: Instant,
    ) -> Result<(), NcclError> {
        if !self.patience.is_over(began) {
            return Ok(());
        }
        let rank = self.rank;
        let size = self.size;
        let waited_ms = began.elapsed().as_millis();
        Err(NcclError::Late { operation, rank, size, waited_ms })
    }

    /// NCCL's report of the calls that were issued. Of a communicator that was given up, the thread
    /// tells the reason that did it.
    pub(super) fn health(&self) -> Result<(), NcclError> {
        self.raw.map_or(Ok(()), |_| self.state("watch").map(drop))
    }

    /// Success or in progress; anything else is an error.
    fn state(&self, operation: &'static str) -> Result<ncclResult_t, NcclError> {
        let raw = self.raw(operation)?;
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: NC-4, the communicator lives, and a status is written to where it is told to.
        let status = unsafe { (self.nccl.functions().ncclCommGetAsyncError)(raw, &raw mut state) };
        match (status, state) {
            (
                ncclResult_t::ncclSuccess,
                ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress,
            ) => Ok(state),
            (ncclResult_t::ncclSuccess, failed) | (failed, _) => {
                Err(self.refused(operation, failed))
            }
        }
    }

    fn asked(
        &self,
        operation: &'static str,
        ask: unsafe extern "C" fn(ncclComm_t, *mut std::os::raw::c_int) -> ncclResult_t,
    ) -> Result<usize, NcclError> {
        let raw = self.raw(operation)?;
        let mut number = 0;
        // SAFETY: NC-4, the communicator lives, and a number is written to where it is told to.
        match unsafe { ask(raw, &raw mut number) } {
            ncclResult_t::ncclSuccess => Ok(usize::try_from(number).unwrap_or(0)),
            status => Err(self.refused(operation, status)),
        }
    }

    pub(super) fn refused(&self, operation: &'static str, status: ncclResult_t) -> NcclError {
        let raw = self.raw.map_or(std::ptr::null_mut(), |raw| raw.0);
        refused(self.nccl, raw, operation, self.rank, self.size, status)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.give_up();
    }
}

pub(super) fn load() -> Result<&'static Nccl, NcclError> {
    Nccl::load().map_err(|error| NcclError::Missing { reason: error.to_string() })
}

pub(super) fn refused(
    nccl: &Nccl,
    raw: ncclComm_t,
    operation: &'static str,
    rank: usize,
    size: usize,
    status: ncclResult_t,
) -> NcclError {
    let (meaning, last) = texts(nccl, raw, status);
    NcclError::Refused { operation, rank, size, status: status.to_string(), meaning, last }
}

/// The status of a split that began. NCCL 2.30 answers success while it is in progress, and only
/// the communicator's own state tells.
fn begun(status: ncclResult_t) -> ncclResult_t {
    match status {
        ncclResult_t::ncclSuccess => ncclResult_t::ncclInProgress,
        other => other,
    }
}

/// A rank, a count or a color, as NCCL takes them. More than 2^31 ranks there are not.
fn of(number: usize) -> std::os::raw::c_int {
    number.try_into().unwrap_or(std::os::raw::c_int::MAX)
}

#[expect(clippy::disallowed_methods, reason = "NCCL has no wait that ends by a clock")]
fn look_later() {
    thread::sleep(LOOK);
}

/// The id by which the ranks of a communicator find each other. One rank makes it, and the program
/// sends it to the others.
#[derive(Clone, Copy)]
pub struct UniqueId(pub(crate) [u64; 16]);

impl UniqueId {
    /// In place of an id, of ranks that make none.
    pub(crate) const NONE: Self = Self([0; 16]);

    pub(super) fn raw(self) -> ncclUniqueId {
        ncclUniqueId { internal: bytemuck::cast(self.0) }
    }

    /// Makes a new id.
    ///
    /// # Errors
    /// [`NcclError::Missing`] if NCCL cannot be loaded; [`NcclError::Refused`].
    pub fn new() -> Result<Self, NcclError> {
        let nccl = load()?;
        let mut id = Self::NONE.raw();
        // SAFETY: NC-4, it writes an id to where it is told to.
        let status = unsafe { (nccl.functions().ncclGetUniqueId)(&raw mut id) };
        match status {
            ncclResult_t::ncclSuccess => Ok(Self(bytemuck::cast(id.internal))),
            status => Err(refused(nccl, std::ptr::null_mut(), "unique id", 0, 0, status)),
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// The longest time to wait.
#[derive(Clone)]
pub struct Patience {
    pub(super) limit: Duration,
    ended: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl Patience {
    /// So long, but no longer than until waiting `ended` to be of use.
    pub fn until(limit: Duration, ended: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { limit, ended: Arc::new(ended) }
    }

    pub(super) fn is_over(&self, began: Instant) -> bool {
        began.elapsed() >= self.limit || (self.ended)()
    }
}

impl fmt::Debug for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patience").field("limit", &self.limit).finish_non_exhaustive()
    }
}
