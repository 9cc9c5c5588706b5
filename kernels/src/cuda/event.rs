//! Moments: the ends of operations, for which other streams and the host can wait.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::device::{Device, Handle};
use super::driver::{CUevent, CUstream};
use super::error::CudaError;

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

/// One of the users of an event. When the last is dropped, the event is unused. It costs no allocation, as an `Arc` would.
#[derive(Debug)]
struct Event(&'static Slot);

/// The end of an operation, or of all operations that were issued on a stream so far.
#[derive(Clone, Debug)]
pub struct Moment {
    event: Event,
    /// The stream on which it was issued.
    pub(super) stream: u64,
    /// The number of the operation on that stream, from 1.
    pub(super) number: u64,
}

/// An event that is not yet recorded, and becomes a moment.
#[derive(Debug)]
pub(super) struct Upcoming(Event);

impl Upcoming {
    /// Takes an event before an operation is issued, so that every issued operation has an event.
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        Event::take(device).map(Self)
    }

    /// Records the end of all operations that were issued on `raw` so far, as number `number` of `stream`.
    pub(super) fn record(
        self,
        raw: CUstream,
        (stream, number): (u64, u64),
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

    /// Blocks the calling thread until the device has reached this moment, for at most `patience`. `operation` names
    /// the operation in an error.
    ///
    /// # Errors
    /// [`CudaError::Late`] if the moment is not reached after `patience`; [`CudaError::Driver`] if the operation, or
    /// one before it, has failed.
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

impl Event {
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

impl Clone for Event {
    fn clone(&self) -> Self {
        self.0.users.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

/// Streams that wait for the event have their wait issued already. Recording the event anew does not change these
/// waits.
impl Drop for Event {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.device.shared().events.0.lock().push(self.0);
        }
    }
}
