//! A stream, and how operations are put on it. `CUDA.md`, "Issuing".

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::CUstream;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::buffer::DeviceBuffer;
use super::device::{Device, Handle};
use super::error::CudaError;
use super::event::{Moment, Upcoming};
use super::memory::Uses;

/// Streams of all devices so far: a number says which one is meant.
static STREAMS: AtomicU64 = AtomicU64::new(0);

/// An order of operations on a device. Operations of different streams run at the same time where their buffers allow it.
pub struct Stream {
    device: Device,
    id: u64,
    raw: Handle<CUstream>,
    owned: Owned,
    progress: Mutex<Progress>,
}

/// Who gives a stream back to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owned {
    ByThis,
    ByAnother,
}

/// One of several operations that are issued together: its stream, and the buffers that it reads and writes.
#[derive(Debug)]
pub struct Together<'a> {
    /// Where it runs.
    pub stream: &'a Stream,
    /// What it reads.
    pub reads: Vec<&'a DeviceBuffer>,
    /// What it writes.
    pub writes: Vec<&'a mut DeviceBuffer>,
}

/// Where on a stream an operation comes.
struct Place<'a> {
    progress: MutexGuard<'a, Progress>,
    upcoming: Upcoming,
}

/// What has been issued on a stream.
#[derive(Debug, Default)]
struct Progress {
    /// Operations so far.
    issued: u64,
    /// By stream: the number up to which this one has waited for its operations.
    seen: HashMap<u64, u64>,
}

impl Stream {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        device.make_current()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking);
        let raw = Handle(raw.map_err(|error| device.refused("make a stream", error))?);
        let id = STREAMS.fetch_add(1, Ordering::Relaxed);
        let (device, progress) = (device.clone(), Mutex::default());
        Ok(Self { device, id, raw, owned: Owned::ByThis, progress })
    }

    /// A stream of another library, which is not given back with this.
    ///
    /// # Safety
    /// CU-7: it is a stream of the device's primary context, and lives at least as long as this.
    #[must_use]
    pub unsafe fn foreign(device: &Device, raw: CUstream) -> Self {
        let id = STREAMS.fetch_add(1, Ordering::Relaxed);
        let (device, raw, progress) = (device.clone(), Handle(raw), Mutex::default());
        Self { device, id, raw, owned: Owned::ByAnother, progress }
    }

    /// Has what is issued here from now on come behind all that was done with some memory.
    pub(super) fn wait_for(&self, uses: &Uses) -> Result<(), CudaError> {
        self.device.make_current()?;
        let mut awaited = Awaited::of(self.id);
        uses.all(|moment| awaited.add(moment));
        let mut progress = self.progress.lock();
        awaited.moments.iter().try_for_each(|moment| self.wait_once(&mut progress, moment))
    }

    /// The device on which it runs.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Puts an operation of another library on this stream, which reads and writes these buffers and no other memory of ours.
    /// `call` is given the driver's handle of the stream, and returns when the operation is on it.
    ///
    /// # Errors
    /// What `call` returns; [`CudaError::Driver`] if an operation before it has failed.
    pub fn enqueue<E: From<CudaError>>(
        &self,
        buffers: (&[&DeviceBuffer], &mut [&mut DeviceBuffer]),
        call: impl FnOnce(CUstream) -> Result<(), E>,
    ) -> Result<(), E> {
        self.put(buffers, call).map(drop)
    }

    /// The same of the driver's own operations.
    pub(super) fn issue(
        &self,
        operation: &str,
        buffers: (&[&DeviceBuffer], &mut [&mut DeviceBuffer]),
        launch: impl FnOnce(CUstream) -> Result<(), DriverError>,
    ) -> Result<Moment, CudaError> {
        self.put(buffers, |raw| launch(raw).map_err(|error| self.device.refused(operation, error)))
    }

    fn put<E: From<CudaError>>(
        &self,
        (reads, writes): (&[&DeviceBuffer], &mut [&mut DeviceBuffer]),
        call: impl FnOnce(CUstream) -> Result<(), E>,
    ) -> Result<Moment, E> {
        let place = self.prepare((reads, writes))?;
        let outcome = call(self.raw.0);
        let moment = self.record(place, (reads, writes));
        outcome.and(moment.map_err(E::from))
    }

    /// Has the stream wait for what an operation on these buffers comes after.
    fn prepare(
        &self,
        (reads, writes): (&[&DeviceBuffer], &[&mut DeviceBuffer]),
    ) -> Result<Place<'_>, CudaError> {
        self.device.make_current()?;
        reads.iter().try_for_each(|buffer| self.check(buffer))?;
        writes.iter().try_for_each(|buffer| self.check(buffer))?;
        let mut awaited = Awaited::of(self.id);
        reads.iter().for_each(|buffer| buffer.uses().written(|moment| awaited.add(moment)));
        writes.iter().for_each(|buffer| buffer.uses().all(|moment| awaited.add(moment)));
        let mut progress = self.progress.lock();
        awaited.moments.iter().try_for_each(|moment| self.wait_once(&mut progress, moment))?;
        let upcoming = Upcoming::new(&self.device)?;
        Ok(Place { progress, upcoming })
    }

    /// Notes that what was issued there uses these buffers; also where a call failed, which may have issued something before.
    fn record(
        &self,
        place: Place<'_>,
        (reads, writes): (&[&DeviceBuffer], &[&mut DeviceBuffer]),
    ) -> Result<Moment, CudaError> {
        let Place { mut progress, upcoming } = place;
        progress.issued += 1;
        let moment = upcoming.record(self.raw.0, (self.id, progress.issued));
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

    /// Puts several operations of another library on as many streams, by one `call`, which is given the driver's handles of the
    /// streams in the order of `parts`: for operations none of which is on its stream before all are.
    ///
    /// If `call` fails, the memory of all these buffers is never used again: it may have begun something.
    ///
    /// # Errors
    /// What `call` returns; [`CudaError::Mismatch`] if two parts are on one stream; [`CudaError::Driver`] if an operation before has failed.
    pub fn enqueue_together<E: From<CudaError>>(
        parts: &mut [Together<'_>],
        call: impl FnOnce(&[CUstream]) -> Result<(), E>,
    ) -> Result<(), E> {
        let raws: Vec<CUstream> = parts.iter().map(|part| part.stream.raw.0).collect();
        // In one order, whoever does this at the same time with some of the same streams.
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_unstable_by_key(|index| parts[*index].stream.id);
        if order.windows(2).any(|pair| parts[pair[0]].stream.id == parts[pair[1]].stream.id) {
            let problem = "two of several operations are on one stream".to_owned();
            return Err(CudaError::Mismatch { operation: "issue together", problem }.into());
        }
        let mut places = Vec::with_capacity(parts.len());
        for index in &order {
            let Together { stream, reads, writes } = &parts[*index];
            places.push(stream.prepare((reads, writes))?);
        }
        let called = call(&raws);
        let mut recorded = Ok(());
        for (index, place) in order.into_iter().zip(places) {
            let Together { stream, reads, writes } = &parts[index];
            recorded = recorded.and(stream.record(place, (reads, writes)).map(drop));
            if called.is_err() {
                // The library may still put something on the stream, behind what was recorded.
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
        let (own, other) = (self.device.ordinal(), buffer.device().ordinal());
        let problem = format!("a buffer of device {other} on a stream of device {own}");
        Err(CudaError::Mismatch { operation: "issue", problem })
    }

    /// Waits on the host until all that was issued is done.
    ///
    /// # Errors
    /// [`CudaError::Late`] after `patience`; [`CudaError::Driver`] if an operation has failed.
    pub fn wait(&self, operation: &str, patience: Duration) -> Result<(), CudaError> {
        self.moment()?.wait(operation, patience)
    }

    /// The end of all that was issued so far.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn moment(&self) -> Result<Moment, CudaError> {
        self.device.make_current()?;
        let upcoming = Upcoming::new(&self.device)?;
        let mut progress = self.progress.lock();
        progress.issued += 1;
        upcoming.record(self.raw.0, (self.id, progress.issued))
    }

    /// Waits for a moment of another stream, on the device, unless this one is known to be past it.
    fn wait_once(&self, progress: &mut Progress, moment: &Moment) -> Result<(), CudaError> {
        let seen = progress.seen.get(&moment.stream).copied().unwrap_or_default();
        if seen >= moment.number {
            return Ok(());
        }
        moment.hold_back(self.raw.0)?;
        progress.seen.insert(moment.stream, moment.number);
        Ok(())
    }
}

/// The last moment of each other stream that an operation waits for: one wait a stream, however many buffers there are.
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

/// What was issued still runs to its end.
impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned == Owned::ByAnother || self.device.make_current().is_err() {
            return;
        }
        // SAFETY: CU-2, the stream lives, and nobody uses it any more.
        if let Err(error) = unsafe { result::stream::destroy(self.raw.0) } {
            tracing::warn!(?error, "a stream could not be given back");
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
