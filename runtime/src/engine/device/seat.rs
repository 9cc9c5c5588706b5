//! A rank's device, and the stream of what it computes there itself.

use std::time::Duration;

use hsdp_kernels::cuda::{CudaError, Device, DeviceBuffer, Stream};
use hsdp_sharding::DType;

use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::placement::Placement;

/// A rank's device.
#[derive(Debug)]
pub(crate) struct DeviceSeat {
    /// For casts of shards, updates, and what is read back. Collectives have streams of their own.
    pub(super) stream: Stream,
    /// How long the host waits for it.
    pub(super) patience: Duration,
}

impl DeviceSeat {
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The device of a placement, with its kernels compiled; `None` on the host.
    ///
    /// # Errors
    /// [`Error::Placement`] if it cannot be used.
    pub(crate) fn of(placement: Placement, patience: Duration) -> Result<Option<Self>, Error> {
        let Placement::Cuda { ordinal } = placement else { return Ok(None) };
        let open = || {
            let device = Device::new(ordinal)?;
            device.prepare()?;
            device.stream()
        };
        let stream = open().map_err(|error| Error::Placement { error })?;
        Ok(Some(Self { stream, patience }))
    }

    pub(super) fn buffer(
        &self,
        dtype: DType,
        len: usize,
        what: &str,
    ) -> Result<DeviceBuffer, CudaError> {
        DeviceBuffer::new(self.stream.device(), dtype, len, what)
    }
}

impl Fabric {
    /// The device, where what lies on one is at hand.
    pub(super) fn seat(&self) -> &DeviceSeat {
        self.device.as_ref().expect("what lies on a device is of a model on that device")
    }

    /// An error of the device, with what it was about.
    pub(crate) fn device_error(
        &self,
        operation: &'static str,
        step: u64,
        error: CudaError,
    ) -> Error {
        Error::Device { operation, rank: self.rank(), step, error }
    }
}
