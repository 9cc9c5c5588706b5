//! Moments: ends of operations, for which other streams can wait.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream};
use parking_lot::Mutex;

use super::device::{Device, Handle};
use super::error::CudaError;

/// The events of a device that nobody holds.
#[derive(Debug, Default)]
pub(super) struct Events(Mutex<Vec<Handle<CUevent>>>);

/// An event, which goes back when nobody holds it.
#[derive(Debug)]
struct Event {
    device: Device,
    event: Handle<CUevent>,
}

/// The end of an operation.
#[derive(Clone, Debug)]
pub(super) struct Moment {
    event: Arc<Event>,
    /// The stream on which it was issued.
    pub(super) stream: u64,
    /// Its number there, from 1.
    pub(super) number: u64,
}

impl Moment {
    /// The end of all that was issued on `raw` so far, as number `number` of `stream`.
    pub(super) fn record(
        device: &Device,
        raw: CUstream,
        (stream, number): (u64, u64),
    ) -> Result<Self, CudaError> {
        let event = Event::take(device)?;
        // SAFETY: CU-2, both live, and the context is current: the caller has issued something.
        let recorded = unsafe { result::event::record(event.event.0, raw) };
        recorded.map_err(|error| device.refused("record an event", error))?;
        Ok(Self { event: Arc::new(event), stream, number })
    }

    /// Has `raw` wait for it, on the device.
    pub(super) fn hold_back(&self, raw: CUstream) -> Result<(), CudaError> {
        let Event { device, event } = &*self.event;
        let flags = cudarc::driver::sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: CU-2, both live; the event was recorded.
        let waits = unsafe { result::stream::wait_event(raw, event.0, flags) };
        waits.map_err(|error| device.refused("wait for an event", error))
    }

    /// Whether it has come.
    pub(super) fn has_come(&self) -> Result<bool, CudaError> {
        let Event { device, event } = &*self.event;
        // SAFETY: CU-2, the event lives, and was recorded.
        match unsafe { result::event::query(event.0) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_READY => {
                Ok(false)
            }
            Err(error) => Err(device.refused("query an event", error)),
        }
    }
}

impl Event {
    fn take(device: &Device) -> Result<Self, CudaError> {
        if let Some(event) = device.0.events.0.lock().pop() {
            return Ok(Self { device: device.clone(), event });
        }
        let made = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = made.map_err(|error| device.refused("make an event", error))?;
        Ok(Self { device: device.clone(), event: Handle(event) })
    }
}

/// Who waits for it on a device has said so already: to record it anew does not change what they wait for.
impl Drop for Event {
    fn drop(&mut self) {
        self.device.0.events.0.lock().push(self.event);
    }
}
