//! A rank's device, and the stream of the rank's own work there.

use std::sync::Arc;
use std::time::Duration;

use hsdp_comm::{Group, World};
use hsdp_kernels::cuda::{CudaError, Device, DeviceBuffer, Stream};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{DType, Offload, Plan};
use parking_lot::Mutex;

use crate::error::Error;
use crate::options::placement::Placement;
use crate::state::scratch::Scratch;

/// A rank's device.
#[derive(Debug)]
pub(crate) struct ModelDevice {
    /// The stream for casts of shards, updates, and copies to the host. Collectives have streams of
    /// their own.
    pub(crate) stream: Arc<Stream>,
    /// How long the host waits for the stream.
    pub(crate) patience: Duration,
    /// The parts of the model that are on the host.
    pub(crate) offload: Offload,
    /// The host memory for updates of these parts.
    pub(super) scratch: Mutex<Scratch>,
}

impl ModelDevice {
    /// Opens the device of a placement and compiles its kernels; returns `None` on the host.
    ///
    /// # Errors
    /// [`Error::Placement`] if the device cannot be used; [`Error::Kernel`] if there is no host
    /// memory for the offloaded parts.
    pub(crate) fn of(
        placement: Placement,
        patience: Duration,
        plan: &Plan,
    ) -> Result<Option<Arc<Self>>, Error> {
        let Placement::Cuda { ordinal, offload } = placement else { return Ok(None) };
        let open = || {
            let device = Device::new(ordinal)?;
            device.prepare()?;
            device.stream()
        };
        let stream = open().map_err(|error| Error::Placement { error })?;
        let stream = Arc::new(stream);
        let scratch = Mutex::new(Scratch::new(plan, offload)?);
        Ok(Some(Arc::new(Self { stream, patience, offload, scratch })))
    }

    /// Connects the groups by NCCL, if the world uses NCCL.
    ///
    /// # Errors
    /// [`Error::Options`] if the world's device is another; [`Error::Comm`].
    #[cfg(feature = "nccl")]
    pub(crate) fn connect(&self, world: &World, groups: &[&Group]) -> Result<(), Error> {
        let Some(connected) = world.nccl_device() else { return Ok(()) };
        let own = self.stream.device();
        if connected != *own {
            let (connected, own) = (connected.ordinal(), own.ordinal());
            let what =
                format!("the model is on device {own}, NCCL in this world uses device {connected}");
            return Err(Error::Options { what });
        }
        Ok(world.connect_groups(groups)?)
    }

    #[cfg(not(feature = "nccl"))]
    #[expect(clippy::unnecessary_wraps, clippy::unused_self, reason = "as where there is NCCL")]
    pub(crate) fn connect(&self, _: &World, _: &[&Group]) -> Result<(), Error> {
        Ok(())
    }

    /// Makes a buffer whose memory counts in this category.
    pub(crate) fn buffer(
        &self,
        category: Category,
        dtype: DType,
        len: usize,
    ) -> Result<DeviceBuffer, CudaError> {
        let what = match category {
            Category::Shard => "parameters",
            Category::GatherInput => "parameters to gather",
            Category::Full => "a gathered unit",
            Category::GradFull => "unsharded gradients",
            Category::Partial => "partials",
            Category::Optimizer => "optimizer state",
            Category::Update | Category::Snapshot | Category::Load | Category::Other => "a step",
        };
        let _scope = memory::scope(category);
        DeviceBuffer::new(self.stream.device(), dtype, len, what)
    }

    /// Copies f32 values to the host. Waits for the copy.
    pub(crate) fn read_f32(&self, values: &DeviceBuffer) -> Result<Vec<f32>, CudaError> {
        Ok(values.read_back(&self.stream, self.patience)?.values().to_f32())
    }
}
