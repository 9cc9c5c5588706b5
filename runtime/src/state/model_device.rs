//! A rank's device, the stream of the rank's own work there, and host memory for the updates of
//! units that are offloaded.

use std::sync::Arc;
use std::time::Duration;

use hsdp_comm::{Group, World};
use hsdp_kernels::HostBuffer;
use hsdp_kernels::cuda::{CudaError, Device, DeviceBuffer, Stream};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{ByteCount, DType, MemoryPlan, Offload, Plan, UnitId};
use parking_lot::Mutex;

use crate::error::Error;
use crate::options::placement::Placement;

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
            let connected = connected.ordinal();
            let own = own.ordinal();
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
            // Buffers of a model lie on the host.
            Category::Buffers
            | Category::Update
            | Category::Snapshot
            | Category::Load
            | Category::Other => "a step",
        };
        let _scope = memory::scope(category);
        DeviceBuffer::new(self.stream.device(), dtype, len, what)
    }
}

/// Host memory for one unit at a time, each buffer as large as the largest unit needs. Its size is
/// [`Plan::memory_offloaded`].
#[derive(Debug)]
pub(super) struct Scratch {
    pub(super) gradient: Vec<f32>,
    pub(super) master: Vec<f32>,
    /// Rounded copies, for the device, of masters that stay on the host: one for each dtype except
    /// f32 in which units compute.
    pub(super) rounded: Vec<HostBuffer>,
}

impl Scratch {
    /// Makes the buffers.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(super) fn new(plan: &Plan, offload: Offload) -> Result<Self, hsdp_kernels::Error> {
        let MemoryPlan { partial, shard, .. } = plan.memory_offloaded(offload);
        // With `All` the shards lie on the host, and need no scratch memory.
        let master = if offload == Offload::Optimizer { shard } else { ByteCount::ZERO };
        let room = |category, bytes: ByteCount| {
            let _scope = memory::scope(category);
            let bytes = usize::try_from(bytes.get()).unwrap_or(usize::MAX);
            hsdp_kernels::zeros(bytes / DType::F32.size_bytes())
        };
        Ok(Self {
            gradient: room(Category::Partial, partial)?,
            master: room(Category::Shard, master)?,
            rounded: if offload == Offload::All { rounded_copies(plan)? } else { Vec::new() },
        })
    }
}

/// Makes a buffer for each dtype except f32 in which units compute, as long as the longest shard of
/// these units, or the longest slice if replicas divide state.
fn rounded_copies(plan: &Plan) -> Result<Vec<HostBuffer>, hsdp_kernels::Error> {
    let len = |unit: UnitId| match plan.divides_state() {
        true => plan.mesh().ranks().map(|rank| plan.updated(unit, rank).len()).max().unwrap_or(0),
        false => plan.layout(unit).shard_len(),
    };
    let longest = |dtype: DType| {
        let units = plan.spec().unit_ids().filter(|unit| plan.compute_dtype(*unit) == dtype);
        Some((dtype, units.map(len).max()?))
    };
    let halves = [DType::BF16, DType::F16].into_iter().filter_map(longest);
    let room = |(dtype, len)| {
        // The list of buffers is small, and not counted.
        let _gather_input = memory::scope(Category::GatherInput);
        HostBuffer::zeros(dtype, len)
    };
    halves.map(room).collect()
}
