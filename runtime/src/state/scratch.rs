//! Host memory for the updates of units that are offloaded.

use hsdp_kernels::HostBuffer;
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{ByteCount, DType, MemoryPlan, Offload, Plan};

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
