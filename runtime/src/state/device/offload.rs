//! Updates on the host of a unit whose sums are on a device, and whose parameters are there or on the host.
//!
//! One unit at a time: its gradient is copied to the host, the parameters are updated, and the gather input goes back.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, HostBuffer, Values, cast};
use hsdp_sharding::{ByteCount, DType, MemoryPlan, Offload, Plan};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::device::shard::{DeviceShard, make_mut};
use crate::state::device::{DeviceSums, ModelDevice};

/// Host memory for one unit at a time, each buffer as large as the largest unit needs: as [`Plan::memory_offloaded`]
/// says.
#[derive(Debug)]
pub(super) struct Scratch {
    gradient: Vec<f32>,
    master: Vec<f32>,
    /// Rounded copies, for the device, of masters that stay on the host: one for each dtype except
    /// f32 in which units compute.
    rounded: Vec<HostBuffer>,
}

impl Scratch {
    /// # Errors
    /// If there is no memory for it.
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
/// these units.
fn rounded_copies(plan: &Plan) -> Result<Vec<HostBuffer>, hsdp_kernels::Error> {
    let longest = |dtype: DType| {
        let units = plan.spec().unit_ids().filter(|unit| plan.compute_dtype(*unit) == dtype);
        Some((dtype, units.map(|unit| plan.layout(unit).shard_len()).max()?))
    };
    let halves = [DType::BF16, DType::F16].into_iter().filter_map(longest);
    let room = |(dtype, len)| {
        // The list of buffers is small, and not counted.
        let _gather_input = memory::scope(Category::GatherInput);
        HostBuffer::zeros(dtype, len)
    };
    halves.map(room).collect()
}

impl DeviceShard {
    /// Calls `update` with f32 parameters and sums of gradients, both on the host, and copies the new parameters to the
    /// device. Waits for the copies to the host, and nothing else.
    ///
    /// # Errors
    /// Those of the device: the gather input may then be older than the parameters.
    pub(crate) fn update_on_host(
        &mut self,
        context: &Context,
        (sums, step): (&DeviceSums, u64),
        update: impl FnOnce(&mut [f32], &[f32]),
    ) -> Result<(), Error> {
        let updated = self.update_through_host(context, sums, update);
        updated.map_err(|error| context.device_error("optimizer step", step, error))
    }

    fn update_through_host(
        &mut self,
        context: &Context,
        sums: &DeviceSums,
        update: impl FnOnce(&mut [f32], &[f32]),
    ) -> Result<(), CudaError> {
        let (device, mut scratch) = (context.model_device(), context.model_device().scratch.lock());
        let by = (&*device.stream, device.patience);
        let Scratch { gradient, master: through, rounded } = &mut *scratch;
        let gradient = &mut gradient[..sums.len()];
        sums.values().read_back_into(by, 0, gradient)?;
        match self {
            Self::There { .. } => {
                let (master, gather_input) = self.exclusive(device)?;
                let through = &mut through[..master.len()];
                master.read_back_into(by, 0, through)?;
                update(through, gradient);
                master.write(&device.stream, Values::F32(through))?;
                let Some(gather_input) = gather_input else { return Ok(()) };
                device.stream.narrow(gather_input, master, Divisor::ONE)
            }
            Self::Offloaded { master, gather_input } => {
                let master = {
                    let _shard = memory::scope(Category::Shard);
                    Arc::make_mut(master)
                };
                update(master, gradient);
                let gather_input = make_mut((device, Category::GatherInput), gather_input)?;
                upload(device, master, rounded, gather_input)
            }
        }
    }

    /// A shard whose master stays on the host.
    pub(super) fn offloaded(
        device: &ModelDevice,
        (master, compute): (Vec<f32>, DType),
    ) -> Result<Self, CudaError> {
        let mut gather_input = device.buffer(Category::GatherInput, compute, master.len())?;
        upload(device, &master, &mut device.scratch.lock().rounded, &mut gather_input)?;
        Ok(Self::Offloaded { master: Arc::new(master), gather_input: Arc::new(gather_input) })
    }
}

/// Copies a master to the device, in the dtype of the buffer there. It is rounded on the host, in
/// the buffer of `rounded` with that dtype, so that fewer bytes are copied.
fn upload(
    device: &ModelDevice,
    master: &[f32],
    rounded: &mut [HostBuffer],
    gather_input: &mut DeviceBuffer,
) -> Result<(), CudaError> {
    if gather_input.dtype() == DType::F32 {
        return gather_input.write(&device.stream, Values::F32(master));
    }
    let of_dtype = rounded.iter_mut().find(|rounded| rounded.dtype() == gather_input.dtype());
    let rounded = of_dtype.expect("there is one for each dtype in which a unit computes");
    let all = 0..master.len();
    cast(rounded.values_mut().slice(all.clone()), master);
    gather_input.write(&device.stream, rounded.values().slice(all))
}
