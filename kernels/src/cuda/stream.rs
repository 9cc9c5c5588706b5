//! A stream, and how operations are put on it. `CUDA.md`, "Issuing".

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::CUstream;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::buffer::DeviceBuffer;
use super::device::{Device, Handle};
use super::error::CudaError;
use super::event::{Moment, Upcoming};

/// Streams of all devices so far: a number says which one is meant.
static STREAMS: AtomicU64 = AtomicU64::new(0);

/// An order of operations on a device. Operations of different streams run at the same time where their buffers allow it.
pub struct Stream {
    device: Device,
    id: u64,
    raw: Handle<CUstream>,
    progress: Mutex<Progress>,
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
        Ok(Self { device: device.clone(), id, raw, progress: Mutex::default() })
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
        self.device.make_current()?;
        reads.iter().try_for_each(|buffer| self.check(buffer))?;
        writes.iter().try_for_each(|buffer| self.check(buffer))?;
        let mut awaited = Awaited::of(self.id);
        reads.iter().for_each(|buffer| buffer.uses().written(|moment| awaited.add(moment)));
        writes.iter().for_each(|buffer| buffer.uses().all(|moment| awaited.add(moment)));
        let mut progress = self.progress.lock();
        awaited.moments.iter().try_for_each(|moment| self.wait_once(&mut progress, moment))?;
        let upcoming = Upcoming::new(&self.device)?;
        let outcome = call(self.raw.0);
        progress.issued += 1;
        // A call that failed may have issued something before.
        match upcoming.record(self.raw.0, (self.id, progress.issued)) {
            Ok(moment) => {
                reads.iter().for_each(|buffer| buffer.uses().note_read(&moment));
                writes.iter().for_each(|buffer| buffer.uses().note_write(&moment));
                outcome.map(|()| moment)
            }
            Err(error) => {
                reads.iter().for_each(|buffer| buffer.uses().lose());
                writes.iter().for_each(|buffer| buffer.uses().lose());
                outcome.and(Err(error.into()))
            }
        }
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
        if self.device.make_current().is_err() {
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
