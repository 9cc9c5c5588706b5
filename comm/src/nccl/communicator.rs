//! A communicator, from its making to its end.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hsdp_kernels::cuda::{Device, Stream};
use nccl_sys::{NCCL_SPLIT_NOCOLOR, Nccl, ncclComm, ncclComm_t, ncclResult_t};

use super::NcclError;
use super::patience::Patience;
use super::unique_id::UniqueId;
use crate::error::nccl::texts;

/// The sleep of a waiting thread between two looks.
const LOOK: Duration = Duration::from_micros(50);

/// A rank's handle of a communicator. One thread at a time can use it.
///
/// Every operation is **collective**: all ranks issue the same operations in the same order. Dropping it aborts the
/// communicator; [`close`](Self::close) ends it in order.
pub struct Communicator {
    pub(super) nccl: &'static Nccl,
    /// There until it is given up.
    raw: Option<Raw>,
    pub(super) device: Device,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// For how long it may take to issue something, too.
    pub(super) patience: Duration,
    /// Whether it is of no use to wait for it any more.
    ended: Box<dyn Fn() -> bool + Send>,
    /// NCCL's communicators are used by one thread at a time.
    not_sync: PhantomData<Cell<()>>,
}

#[derive(Clone, Copy)]
struct Raw(ncclComm_t);

/// A place for a handle. NCCL writes it from a thread of its own, maybe when no thread waits for it any more. So a place is
/// never given back; it is 8 bytes for each communicator that is made.
struct Place(&'static AtomicPtr<ncclComm>);

impl Place {
    fn new() -> Self {
        Self(Box::leak(Box::new(AtomicPtr::new(std::ptr::null_mut()))))
    }

    fn address(&self) -> *mut ncclComm_t {
        self.0.as_ptr()
    }

    /// The handle that was written so far.
    fn handle(&self) -> ncclComm_t {
        self.0.load(Ordering::Acquire)
    }
}

// SAFETY: NC-4, a communicator may go from thread to thread; that one uses it at a time is in the type that owns it.
unsafe impl Send for Raw {}

impl Communicator {
    /// Joins the communicator of `id`, on `device`, as the rank that `place` names: `(rank, size)`. **Collective.**
    ///
    /// # Errors
    /// [`NcclError::Late`] if not all ranks have joined after `patience`; [`NcclError::Missing`] if NCCL cannot be loaded;
    /// [`NcclError::Refused`]; [`NcclError::Device`].
    pub fn join(
        device: &Device,
        id: UniqueId,
        place: (usize, usize),
        patience: Duration,
    ) -> Result<Self, NcclError> {
        Self::join_while(device, id, place, &Patience::of(patience))
    }

    /// The same, with a patience that may end early.
    pub(crate) fn join_while(
        device: &Device,
        id: UniqueId,
        (rank, size): (usize, usize),
        patience: &Patience<'_>,
    ) -> Result<Self, NcclError> {
        let nccl = load()?;
        device.make_current()?;
        let (number, count) = (of(rank), of(size));
        let mut config = nccl.config();
        config.blocking = 0;
        let place = Place::new();
        // SAFETY: NC-4, it writes a handle to its place, now or later, and reads id and config before it returns.
        let status = unsafe {
            (nccl.functions().ncclCommInitRankConfig)(
                place.address(),
                count,
                id.raw(),
                number,
                &raw mut config,
            )
        };
        let joined = Self::made(nccl, place.handle(), device, ((rank, size), patience.limit));
        joined.settle("join", status, patience)?;
        Ok(joined)
    }

    /// Splits the communicator: all ranks with the same color get a communicator of their own, ordered by `key` and
    /// rank. Ranks without a color get `None`. **Collective** over this communicator.
    ///
    /// # Errors
    /// [`NcclError::Late`] after `patience`, [`NcclError::Refused`], [`NcclError::GivenUp`], [`NcclError::Device`]. If
    /// NCCL does not complete the split, this communicator is aborted.
    pub fn split(
        &mut self,
        color: Option<usize>,
        key: usize,
        patience: Duration,
    ) -> Result<Option<Self>, NcclError> {
        self.split_while(color, key, &Patience::of(patience))
    }

    /// The same, with a patience that may end early.
    pub(crate) fn split_while(
        &mut self,
        color: Option<usize>,
        key: usize,
        patience: &Patience<'_>,
    ) -> Result<Option<Self>, NcclError> {
        let raw = self.raw("split")?;
        self.device.make_current()?;
        let mut config = self.nccl.config();
        config.blocking = 0;
        let place = Place::new();
        let number = color.map_or(NCCL_SPLIT_NOCOLOR, of);
        // SAFETY: NC-4, the parent lives; a handle is written to its place, now or later, or null for no color.
        let status = unsafe {
            (self.nccl.functions().ncclCommSplit)(
                raw,
                number,
                of(key),
                place.address(),
                &raw mut config,
            )
        };
        if let Err(error) = self.settle("split", status, patience) {
            // Neither it nor what was split off can be used: NCCL is in the midst of it.
            self.give_up();
            return Err(error);
        }
        if color.is_none() {
            return Ok(None);
        }
        let of_nobody = ((0, 0), patience.limit);
        let mut split = Self::made(self.nccl, place.handle(), &self.device, of_nobody);
        split.settle("split", ncclResult_t::ncclInProgress, patience)?;
        let functions = split.nccl.functions();
        split.rank = split.asked("rank", functions.ncclCommUserRank)?;
        split.size = split.asked("size", functions.ncclCommCount)?;
        Ok(Some(split))
    }

    fn made(
        nccl: &'static Nccl,
        raw: ncclComm_t,
        device: &Device,
        ((rank, size), patience): ((usize, usize), Duration),
    ) -> Self {
        let raw = (!raw.is_null()).then_some(Raw(raw));
        let device = device.clone();
        let ended = Box::new(|| false);
        Self { nccl, raw, device, rank, size, patience, ended, not_sync: PhantomData }
    }

    /// The same, whose operations may take so long to be issued, and which is waited for until it has `ended`.
    pub(super) fn waiting(
        mut self,
        patience: Duration,
        ended: impl Fn() -> bool + Send + 'static,
    ) -> Self {
        (self.patience, self.ended) = (patience, Box::new(ended));
        self
    }

    /// Whether it is of no use to wait for it any more.
    pub(super) fn is_over(&self) -> bool {
        (self.ended)()
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

    /// Waits until all work that was issued on `stream` is done, and NCCL reports no error of this communicator. Aborts the
    /// communicator on an error.
    ///
    /// # Errors
    /// [`NcclError::Late`] after `patience`; [`NcclError::Refused`] with the error that NCCL reports; [`NcclError::GivenUp`];
    /// [`NcclError::Device`].
    pub fn wait(&mut self, stream: &Stream, patience: Duration) -> Result<(), NcclError> {
        let (moment, began) = (stream.moment()?, Instant::now());
        loop {
            let outcome = self.state("wait").and_then(|_| Ok(moment.has_come()?));
            match outcome {
                Ok(true) => return Ok(()),
                Ok(false) if began.elapsed() < patience => look_later(),
                Ok(false) => {
                    self.give_up();
                    return Err(self.late("wait", began));
                }
                Err(error) => {
                    self.give_up();
                    return Err(error);
                }
            }
        }
    }

    /// Waits until all issued operations are done, and destroys the communicator. **Collective.**
    ///
    /// # Errors
    /// [`NcclError::Late`] after `patience`; [`NcclError::Refused`]; [`NcclError::GivenUp`]; [`NcclError::Device`]. The
    /// communicator is aborted then.
    pub fn close(mut self, patience: Duration) -> Result<(), NcclError> {
        self.finish(patience)
    }

    /// The same, of a communicator that others may still look at. After an error, it is aborted by its drop.
    pub(super) fn finish(&mut self, patience: Duration) -> Result<(), NcclError> {
        let raw = self.raw("close")?;
        self.device.make_current()?;
        // SAFETY: NC-4, the communicator lives, and nothing is issued on it any more.
        let status = unsafe { (self.nccl.functions().ncclCommFinalize)(raw) };
        self.settle("close", status, &Patience::until(patience, &self.ended))?;
        self.raw = None;
        // SAFETY: NC-4, it was finalized, and `raw` is forgotten.
        let status = unsafe { (self.nccl.functions().ncclCommDestroy)(raw) };
        match status {
            ncclResult_t::ncclSuccess => Ok(()),
            status => Err(self.refused("close", status)),
        }
    }

    /// Aborts the communicator at once. Its operations end, and those of the other ranks hang until they abort theirs.
    /// Returns before the operations on the device have ended.
    pub fn give_up(&mut self) {
        let Some(raw) = self.raw.take() else { return };
        let (abort, device) = (self.nccl.functions().ncclCommAbort, self.device.clone());
        let abort = move || {
            // The whole of it is moved here, not the pointer in it.
            let raw = raw;
            if device.make_current().is_err() {
                return;
            }
            // SAFETY: NC-4, nobody else has the handle any more: it was taken.
            let status = unsafe { abort(raw.0) };
            if status != ncclResult_t::ncclSuccess {
                tracing::warn!(%status, "NCCL could not abort a communicator");
            }
        };
        // It may wait for the device, which a drop must not.
        let started = thread::Builder::new().name("hsdp-nccl-abort".to_owned()).spawn(abort);
        if let Err(error) = started {
            tracing::warn!(%error, "a communicator could not be aborted: its thread could not be started");
        }
    }

    /// The handle.
    pub(super) fn raw(&self, operation: &'static str) -> Result<ncclComm_t, NcclError> {
        let given_up = NcclError::GivenUp { operation, rank: self.rank, size: self.size };
        self.raw.map(|raw| raw.0).ok_or(given_up)
    }

    /// Waits until a call that may be in progress is not any more.
    pub(super) fn settle(
        &self,
        operation: &'static str,
        status: ncclResult_t,
        patience: &Patience<'_>,
    ) -> Result<(), NcclError> {
        let began = Instant::now();
        match status {
            ncclResult_t::ncclSuccess => return Ok(()),
            ncclResult_t::ncclInProgress => {}
            status => return Err(self.refused(operation, status)),
        }
        while self.state(operation)? == ncclResult_t::ncclInProgress {
            if patience.is_over(began) {
                return Err(self.late(operation, began));
            }
            look_later();
        }
        Ok(())
    }

    /// NCCL's report of the calls that were issued. Of a communicator that was given up, the thread tells the reason that did it.
    pub(super) fn health(&self) -> Result<(), NcclError> {
        self.raw.map_or(Ok(()), |_| self.state("watch").map(drop))
    }

    /// Success or in progress; anything else is an error.
    fn state(&self, operation: &'static str) -> Result<ncclResult_t, NcclError> {
        let (raw, mut state) = (self.raw(operation)?, ncclResult_t::ncclSuccess);
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
        let (raw, mut number) = (self.raw(operation)?, 0);
        // SAFETY: NC-4, the communicator lives, and a number is written to where it is told to.
        match unsafe { ask(raw, &raw mut number) } {
            ncclResult_t::ncclSuccess => Ok(usize::try_from(number).unwrap_or(0)),
            status => Err(self.refused(operation, status)),
        }
    }

    pub(super) fn refused(&self, operation: &'static str, status: ncclResult_t) -> NcclError {
        let raw = self.raw.map_or(std::ptr::null_mut(), |raw| raw.0);
        refused(self.nccl, raw, (operation, self.rank, self.size), status)
    }

    fn late(&self, operation: &'static str, began: Instant) -> NcclError {
        let waited_ms = began.elapsed().as_millis();
        NcclError::Late { operation, rank: self.rank, size: self.size, waited_ms }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

pub(super) fn load() -> Result<&'static Nccl, NcclError> {
    Nccl::load().map_err(|error| NcclError::Missing { reason: error.to_string() })
}

pub(super) fn refused(
    nccl: &Nccl,
    raw: ncclComm_t,
    (operation, rank, size): (&'static str, usize, usize),
    status: ncclResult_t,
) -> NcclError {
    let (meaning, last) = texts(nccl, raw, status);
    NcclError::Refused { operation, rank, size, status: status.to_string(), meaning, last }
}

/// A rank, a count or a color, as NCCL takes them. More than 2^31 ranks there are not.
fn of(number: usize) -> std::os::raw::c_int {
    number.try_into().unwrap_or(std::os::raw::c_int::MAX)
}

#[expect(clippy::disallowed_methods, reason = "NCCL has no wait that ends by a clock")]
fn look_later() {
    thread::sleep(LOOK);
}
