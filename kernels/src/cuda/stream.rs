//! Streams, the order of the operations that are issued on them, and the moments of these.
//! `CUDA.md`, "Issuing".

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use smallvec::SmallVec;

use super::buffer::DeviceBuffer;
use super::device::{Device, Handle};
use super::driver::{CUevent, CUstream, Loaded};
use super::error::CudaError;
use super::memory::Uses;

/// The number of streams of all devices so far. The next stream gets it as its id.
static STREAMS: AtomicU64 = AtomicU64::new(0);

/// A stream of a device: its operations run in the order in which they are issued. Operations of
/// different streams run at the same time, unless one writes a buffer that the other uses.
pub struct Stream {
    device: Device,
    id: u64,
    raw: Handle<CUstream>,
    owned: Owned,
    progress: Mutex<StreamProgress>,
}

/// The owner of the driver's stream, which destroys it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owned {
    ByThis,
    ByAnother,
}

/// One of several operations that [`Stream::enqueue_together`] issues: its stream, and the buffers
/// that it reads and writes.
#[derive(Debug)]
pub struct Together<'a> {
    /// The stream of the operation.
    pub stream: &'a Stream,
    /// The buffers that the operation reads.
    pub reads: Vec<&'a DeviceBuffer>,
    /// The buffers that the operation writes.
    pub writes: Vec<&'a mut DeviceBuffer>,
}

/// An operation of the driver itself, on addresses of the device. Sizes are in bytes.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only the driver reads it"))]
pub(super) enum DriverCall<'a> {
    Fill { address: u64, byte: u8, bytes: usize },
    CopyIn { to: u64, from: &'a [u8] },
    Copy { to: u64, from: u64, bytes: usize },
    CopyOut { to: &'a mut [u8], from: u64 },
    Launch { kernel: Loaded, blocks: u32, threads: u32, arguments: &'a mut [*mut c_void] },
}

/// The place of an operation on a stream.
struct OnStream<'a> {
    progress: MutexGuard<'a, StreamProgress>,
    upcoming: Upcoming,
}

/// The operations of a stream so far.
#[derive(Debug, Default)]
struct StreamProgress {
    /// The number of operations that were issued.
    issued: u64,
    /// By the id of another stream: the number of the last operation there for which this stream
    /// waits.
    seen: HashMap<u64, u64>,
    /// Whether a library may issue operations here at any time, after a call that failed.
    is_lost: bool,
}

impl Stream {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        let raw = Handle(device.context().stream()?);
        let id = STREAMS.fetch_add(1, Ordering::Relaxed);
        let device = device.clone();
        let progress = Mutex::default();
        Ok(Self { device, id, raw, owned: Owned::ByThis, progress })
    }

    /// Wraps a stream of another library. It is not destroyed when the returned value is dropped.
    ///
    /// # Safety
    /// CU-7: `raw` is a stream of the device's primary context, and lives at least as long as the
    /// returned value.
    #[must_use]
    pub unsafe fn foreign(device: &Device, raw: CUstream) -> Self {
        let id = STREAMS.fetch_add(1, Ordering::Relaxed);
        let device = device.clone();
        let raw = Handle(raw);
        let progress = Mutex::default();
        Self { device, id, raw, owned: Owned::ByAnother, progress }
    }

    /// Makes all operations that are issued here from now on wait for all uses of a piece of
    /// memory.
    pub(super) fn wait_for(&self, uses: &Uses) -> Result<(), CudaError> {
        self.device.make_current()?;
        let mut awaited = Awaited::of(self.id);
        uses.all(|moment| awaited.add(moment));
        let mut progress = self.progress.lock();
        awaited.moments.iter().try_for_each(|moment| self.wait_once(&mut progress, moment))
    }

    /// The device of the stream.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Issues an operation of another library on this stream. The operation reads and writes the
    /// buffers in `reads` and `writes`, and must use no other memory of this crate. `call` gets the
    /// driver's handle to the stream, and returns when the operation is issued.
    ///
    /// # Errors
    /// The error of `call`; [`CudaError::Mismatch`] if a buffer is of another device;
    /// [`CudaError::Driver`] if a call of the driver fails, or an operation before has failed.
    pub fn enqueue<E: From<CudaError>>(
        &self,
        reads: &[&DeviceBuffer],
        writes: &mut [&mut DeviceBuffer],
        call: impl FnOnce(CUstream) -> Result<(), E>,
    ) -> Result<(), E> {
        self.put(reads, writes, call).map(drop)
    }

    /// Issues an operation of the driver itself.
    ///
    /// # Safety
    /// CU-5: the operation reads only elements of the buffers that it reads or writes, writes only
    /// elements of those that it writes, and the host memory of a copy stays until the returned
    /// moment.
    pub(super) unsafe fn issue(
        &self,
        reads: &[&DeviceBuffer],
        writes: &mut [&mut DeviceBuffer],
        operation: DriverCall<'_>,
    ) -> Result<Moment, CudaError> {
        // SAFETY: CU-5, the caller's promise is passed on.
        self.put(reads, writes, |raw| unsafe { self.device.context().issue(raw, operation) })
    }

    fn put<E: From<CudaError>>(
        &self,
        reads: &[&DeviceBuffer],
        writes: &mut [&mut DeviceBuffer],
        call: impl FnOnce(CUstream) -> Result<(), E>,
    ) -> Result<Moment, E> {
        let place = self.prepare(reads, writes)?;
        let outcome = call(self.raw.0);
        let moment = self.record(place, reads, writes);
        outcome.and(moment.map_err(E::from))
    }

    /// Makes the stream wait for the earlier operations that an operation on these buffers must
    /// follow.
    fn prepare(
        &self,
        reads: &[&DeviceBuffer],
        writes: &[&mut DeviceBuffer],
    ) -> Result<OnStream<'_>, CudaError> {
        self.device.make_current()?;
        reads.iter().try_for_each(|buffer| self.check(buffer))?;
        writes.iter().try_for_each(|buffer| self.check(buffer))?;
        let mut awaited = Awaited::of(self.id);
        reads.iter().for_each(|buffer| buffer.uses().written(|moment| awaited.add(moment)));
        writes.iter().for_each(|buffer| buffer.uses().all(|moment| awaited.add(moment)));
        let mut progress = self.progress.lock();
        awaited.moments.iter().try_for_each(|moment| self.wait_once(&mut progress, moment))?;
        let upcoming = Upcoming::new(&self.device)?;
        Ok(OnStream { progress, upcoming })
    }

    /// Notes that the issued operation uses these buffers, also if the call failed, since it may
    /// have issued a part.
    fn record(
        &self,
        place: OnStream<'_>,
        reads: &[&DeviceBuffer],
        writes: &[&mut DeviceBuffer],
    ) -> Result<Moment, CudaError> {
        let OnStream { mut progress, upcoming } = place;
        progress.issued += 1;
        let moment = upcoming.record(self.raw.0, self.id, progress.issued);
        match &moment {
            Ok(moment) => {
                reads.iter().for_each(|buffer| buffer.uses().note_read(moment));
                writes.iter().for_each(|buffer| buffer.uses().note_write(moment));
            }
            Err(_) => {
                reads.iter().for_each(|buffer| buffer.uses().lose());
                writes.iter().for_each(|buffer| buffer.uses().lose());
            }
        }
        moment
    }

    /// Issues several operations of another library on as many streams, by one `call`, for
    /// operations that a library issues only together. `call` gets the driver's handles to the
    /// streams in the order of `parts`. Operations that wait for each other are issued under a
    /// [`IssueGuard`](super::IssueGuard), which the caller has.
    ///
    /// If `call` fails, the memory of all these buffers is never used again, and the streams are
    /// never destroyed, because the library may still be issuing the operations.
    ///
    /// # Errors
    /// The error of `call`; [`CudaError::Mismatch`] if two parts are on one stream, or a buffer is
    /// of another device than its stream; [`CudaError::Driver`] if a call of the driver fails, or
    /// an operation before has failed.
    pub fn enqueue_together<E: From<CudaError>>(
        parts: &mut [Together<'_>],
        call: impl FnOnce(&[CUstream]) -> Result<(), E>,
    ) -> Result<(), E> {
        let raws: Vec<CUstream> = parts.iter().map(|part| part.stream.raw.0).collect();
        // Streams are locked in the order of their ids, so that concurrent calls on the same
        // streams cannot deadlock.
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_unstable_by_key(|index| parts[*index].stream.id);
        if order.windows(2).any(|pair| parts[pair[0]].stream.id == parts[pair[1]].stream.id) {
            let problem = "two of the operations are on the same stream".to_owned();
            return Err(CudaError::Mismatch { operation: "issue together", problem }.into());
        }
        let mut places = Vec::with_capacity(parts.len());
        for index in &order {
            let Together { stream, reads, writes } = &parts[*index];
            places.push(stream.prepare(reads, writes)?);
        }
        let called = call(&raws);
        let mut recorded = Ok(());
        for (index, mut place) in order.into_iter().zip(places) {
            let Together { stream, reads, writes } = &parts[index];
            place.progress.is_lost |= called.is_err();
            recorded = recorded.and(stream.record(place, reads, writes).map(drop));
            if called.is_err() {
                // The library may still issue operations on the stream, after the recorded moment.
                reads.iter().for_each(|buffer| buffer.uses().lose());
                writes.iter().for_each(|buffer| buffer.uses().lose());
            }
        }
        called.and(recorded.map_err(E::from))
    }

    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer is of another device.
    fn check(&self, buffer: &DeviceBuffer) -> Result<(), CudaError> {
        if *buffer.device() == self.device {
            return Ok(());
        }
        let own = self.device.ordinal();
        let other = buffer.device().ordinal();
        let problem = format!("a buffer of device {other} on a stream of device {own}");
        Err(CudaError::Mismatch { operation: "issue", problem })
    }

    /// The end of all operations that were issued so far. Does not wait.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if a call of the driver fails, or an operation before has failed.
    pub fn moment(&self) -> Result<Moment, CudaError> {
        self.device.make_current()?;
        let upcoming = Upcoming::new(&self.device)?;
        let mut progress = self.progress.lock();
        progress.issued += 1;
        upcoming.record(self.raw.0, self.id, progress.issued)
    }

    /// Makes this stream wait for a moment of another stream, on the device, unless it already
    /// waits for that moment or a later one.
    fn wait_once(&self, progress: &mut StreamProgress, moment: &Moment) -> Result<(), CudaError> {
        let seen = progress.seen.get(&moment.stream).copied().unwrap_or_default();
        if seen >= moment.number {
            return Ok(());
        }
        moment.hold_back(self.raw.0)?;
        progress.seen.insert(moment.stream, moment.number);
        Ok(())
    }
}

/// The last moment of each other stream for which an operation must wait: one wait per stream,
/// however many buffers there are.
struct Awaited {
    /// The stream of the operation.
    own: u64,
    moments: SmallVec<[Moment; 4]>,
}

impl Awaited {
    fn of(own: u64) -> Self {
        Self { own, moments: SmallVec::new() }
    }

    fn add(&mut self, moment: &Moment) {
        if moment.stream == self.own {
            return;
        }
        match self.moments.iter_mut().find(|known| known.stream == moment.stream) {
            Some(known) if known.number >= moment.number => {}
            Some(known) => *known = moment.clone(),
            None => self.moments.push(moment.clone()),
        }
    }
}

/// Destroys the stream. Operations that were issued still run to their end. A stream on which a
/// library may still issue is leaked.
impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned == Owned::ByAnother || self.progress.get_mut().is_lost {
            return;
        }
        // SAFETY: CU-2, the stream lives, and has no other user any more.
        if let Err(error) = unsafe { self.device.context().destroy(self.raw.0) } {
            hsdp_warnings::warn!(%error, "a CUDA stream could not be destroyed");
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// The time that a waiting thread sleeps between two queries of an event.
const LOOK: Duration = Duration::from_micros(20);

/// The unused events of a device.
#[derive(Debug, Default)]
pub(super) struct Events(Mutex<Vec<&'static Slot>>);

/// An event of the driver, which is never destroyed: it is used again.
#[derive(Debug)]
struct Slot {
    device: Device,
    event: Handle<CUevent>,
    users: AtomicUsize,
}

/// One of the users of an event. When the last is dropped, the event is unused. It costs no
/// allocation, as an `Arc` would.
#[derive(Debug)]
struct DeviceEvent(&'static Slot);

/// The end of an operation, or of all operations that were issued on a stream so far.
#[derive(Clone, Debug)]
pub struct Moment {
    event: DeviceEvent,
    /// The stream on which it was issued.
    pub(super) stream: u64,
    /// The number of the operation on that stream, from 1.
    pub(super) number: u64,
}

/// An event that is not yet recorded, and becomes a moment.
#[derive(Debug)]
pub(super) struct Upcoming(DeviceEvent);

impl Upcoming {
    /// Takes an event before an operation is issued, so that every issued operation has an event.
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        DeviceEvent::take(device).map(Self)
    }

    /// Records the end of all operations that were issued on `raw` so far, as number `number` of
    /// `stream`.
    pub(super) fn record(
        self,
        raw: CUstream,
        stream: u64,
        number: u64,
    ) -> Result<Moment, CudaError> {
        let Slot { device, event, .. } = self.0.0;
        // SAFETY: CU-2, both live, and the context is current: the caller has issued something.
        unsafe { device.context().record(event.0, raw) }?;
        Ok(Moment { event: self.0, stream, number })
    }
}

impl Moment {
    /// Makes the stream `raw` wait for this moment, on the device.
    pub(super) fn hold_back(&self, raw: CUstream) -> Result<(), CudaError> {
        let Slot { device, event, .. } = self.event.0;
        // SAFETY: CU-2, both live; the event was recorded.
        unsafe { device.context().wait_on(raw, event.0) }
    }

    /// Whether the device has reached this moment. Does not wait.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if the operation, or one before it, has failed.
    pub fn has_come(&self) -> Result<bool, CudaError> {
        let Slot { device, event, .. } = self.event.0;
        // SAFETY: CU-2, the event lives, and was recorded.
        unsafe { device.context().has_reached(event.0) }
    }

    /// Blocks the calling thread until the device has reached this moment, for at most `patience`.
    /// `operation` names the operation in an error.
    ///
    /// # Errors
    /// [`CudaError::Late`] if the moment is not reached after `patience`; [`CudaError::Driver`] if
    /// the operation, or one before it, has failed.
    #[expect(clippy::disallowed_methods, reason = "the driver has no wait that ends by a clock")]
    pub fn wait(&self, operation: &str, patience: Duration) -> Result<(), CudaError> {
        let began = Instant::now();
        while !self.has_come()? {
            let waited = began.elapsed();
            if waited >= patience {
                let device = self.event.0.device.ordinal();
                let waited_ms = waited.as_millis();
                return Err(CudaError::Late { operation: operation.to_owned(), device, waited_ms });
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl DeviceEvent {
    fn take(device: &Device) -> Result<Self, CudaError> {
        let unused = device.shared().events.0.lock().pop();
        let slot = unused.map_or_else(|| Slot::new(device), Ok)?;
        slot.users.store(1, Ordering::Relaxed);
        Ok(Self(slot))
    }
}

impl Slot {
    fn new(device: &Device) -> Result<&'static Self, CudaError> {
        let event = Handle(device.context().event()?);
        let slot = Self { device: device.clone(), event, users: AtomicUsize::new(0) };
        Ok(Box::leak(Box::new(slot)))
    }
}

impl Clone for DeviceEvent {
    fn clone(&self) -> Self {
        self.0.users.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

/// Streams that wait for the event have their wait issued already. Recording the event anew does
/// not change these waits.
impl Drop for DeviceEvent {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.device.shared().events.0.lock().push(self.0);
        }
    }
}

/// Written while such operations are issued, by one thread for all devices of the process.
static ISSUED: RwLock<()> = RwLock::new(());

/// Held from before the first of operations that wait for each other until all of them are issued.
/// No other thread issues such operations meanwhile, or makes a call that is [`Apart`] from them.
#[derive(Debug)]
pub struct IssueGuard {
    _guard: RwLockWriteGuard<'static, ()>,
}

impl IssueGuard {
    /// Waits for its turn for `limit` at most; `None` if it has not come.
    #[must_use]
    pub fn begin(limit: Duration) -> Option<Self> {
        ISSUED.try_write_for(limit).map(|guard| Self { _guard: guard })
    }
}

/// While this lives, no operations that wait for each other are partly issued. A call that may wait
/// until a device is idle is made meanwhile, as one that takes or frees memory: between two such
/// operations, the first would wait for the second, and the second for the call.
#[derive(Debug)]
pub struct Apart {
    _guard: RwLockReadGuard<'static, ()>,
}

impl Apart {
    /// Waits until none are partly issued, but not for threads that wait for their turn. An abort
    /// must pass them: another call may wait for the operation that the abort ends, and they wait
    /// for that call.
    #[must_use]
    pub fn begin() -> Self {
        Self { _guard: ISSUED.read_recursive() }
    }
}
