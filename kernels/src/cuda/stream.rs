//! A stream, and how operations are put on it. `CUDA.md`, "Issuing".

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::CUstream;
use parking_lot::Mutex;

use super::buffer::DeviceBuffer;
use super::device::{Device, Handle};
use super::error::CudaError;
use super::event::Moment;

/// How long a waiting thread sleeps between two looks at an event.
const LOOK: Duration = Duration::from_micros(20);

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
        device.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking);
        let raw = Handle(raw.map_err(|error| device.refused("make a stream", error))?);
        let id = device.0.next_stream.fetch_add(1, Ordering::Relaxed);
        Ok(Self { device: device.clone(), id, raw, progress: Mutex::default() })
    }

    /// The device on which it runs.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle, for another library to issue something on: between two operations of ours.
    #[must_use]
    pub fn raw(&self) -> CUstream {
        self.raw.0
    }

    /// Issues `operation`, which reads and writes these buffers and no other memory of ours. Returns when it is issued.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if the driver refuses it, or an operation before it has failed.
    pub(super) fn issue(
        &self,
        operation: &str,
        (reads, writes): (&[&DeviceBuffer], &mut [&mut DeviceBuffer]),
        launch: impl FnOnce(CUstream) -> Result<(), DriverError>,
    ) -> Result<Moment, CudaError> {
        self.device.bind()?;
        let mut progress = self.progress.lock();
        for buffer in reads {
            buffer.uses().written(|moment| self.wait_once(&mut progress, moment))?;
        }
        for buffer in writes.iter() {
            buffer.uses().all(|moment| self.wait_once(&mut progress, moment))?;
        }
        launch(self.raw.0).map_err(|error| self.device.refused(operation, error))?;
        progress.issued += 1;
        let place = (self.id, progress.issued);
        let moment = Moment::record(&self.device, self.raw.0, place)?;
        reads.iter().for_each(|buffer| buffer.uses().note_read(&moment));
        writes.iter().for_each(|buffer| buffer.uses().note_write(&moment));
        Ok(moment)
    }

    /// Has this stream wait, on the device, for all that was issued on `other` so far.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn follow(&self, other: &Self) -> Result<(), CudaError> {
        self.device.bind()?;
        let moment = other.last()?;
        self.wait_once(&mut self.progress.lock(), &moment)
    }

    /// Waits on the host until all that was issued is done.
    ///
    /// # Errors
    /// [`CudaError::Late`] after `patience`; [`CudaError::Driver`] if an operation has failed.
    #[expect(clippy::disallowed_methods, reason = "the driver has no wait that ends by a clock")]
    pub fn wait(&self, operation: &str, patience: Duration) -> Result<(), CudaError> {
        self.device.bind()?;
        let (moment, began) = (self.last()?, Instant::now());
        while !moment.has_come()? {
            let waited = began.elapsed();
            if waited >= patience {
                let device = self.device.ordinal();
                let waited_ms = waited.as_millis();
                return Err(CudaError::Late { operation: operation.to_owned(), device, waited_ms });
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// The end of all that was issued so far.
    fn last(&self) -> Result<Moment, CudaError> {
        let mut progress = self.progress.lock();
        progress.issued += 1;
        Moment::record(&self.device, self.raw.0, (self.id, progress.issued))
    }

    /// Waits for a moment, on the device, unless this stream is known to be past it.
    fn wait_once(&self, progress: &mut Progress, moment: &Moment) -> Result<(), CudaError> {
        let seen = progress.seen.entry(moment.stream).or_default();
        if moment.stream == self.id || *seen >= moment.number {
            return Ok(());
        }
        *seen = moment.number;
        moment.hold_back(self.raw.0)
    }
}

/// What was issued still runs to its end.
impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_err() {
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
