//! A unit's parameters, gathered, and the gather of a unit.

use std::mem;
use std::sync::{Arc, OnceLock};

use hsdp_comm::{Pending, Stage};
use hsdp_kernels::cuda::{DeviceBuffer, DevicePart};
use hsdp_kernels::memory::Category;
use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::{DType, FullCopies, Phase, UnitId, UnitLayout};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::events::Event;
use crate::state::full_pool::Pooled;
use crate::state::shard::Shard;
use crate::state::store::{Located, There};

/// A unit's gathered parameters, in its compute dtype: one host buffer for each parameter, with all
/// of its elements, row-major.
///
/// On a device it is one device buffer, and each parameter is a part of it (`Full::on_device`). All
/// other methods that read values read a copy on the host. The first of these calls makes the copy:
/// it waits for the gather, and panics if the device fails.
///
/// Dropping it reshards the unit: its buffers go back to a pool for later gathers, which keeps no
/// more memory than the plan has ([`Plan::memory`](crate::Plan::memory)).
#[derive(Debug)]
#[must_use = "a gathered unit takes up memory until it is dropped"]
pub struct Full {
    layout: Arc<UnitLayout>,
    /// Compute dtype.
    dtype: DType,
    buffers: FullBuffers,
}

#[derive(Debug)]
enum FullBuffers {
    Own(Pooled),
    /// Buffers that other ranks read too.
    Shared(Arc<Pooled>),
    Device(DeviceFull),
}

/// A unit's parameters on a device: the unit's flat index space, as the layout says.
#[derive(Debug)]
struct DeviceFull {
    full: There<Arc<DeviceBuffer>>,
    /// Copies on the host, by index of the parameter, once they were asked for.
    copies: OnceLock<Vec<HostBuffer>>,
}

impl DeviceFull {
    /// Returns copies on the host, made when they are first asked for.
    ///
    /// # Panics
    /// If the device fails: the call has no error to return.
    fn on_host(&self, layout: &UnitLayout) -> &[HostBuffer] {
        self.copies.get_or_init(|| {
            let There { value, device } = &self.full;
            let all = value.read_back(&device.stream, device.patience);
            let all = all.unwrap_or_else(|error| panic!("a unit could not be read: {error}"));
            let slots = layout.params().iter();
            slots.map(|slot| owned(all.values().slice(slot.range()))).collect()
        })
    }
}

fn owned(values: Values<'_>) -> HostBuffer {
    match values {
        Values::F32(values) => values.to_vec().into(),
        Values::F16(values) => values.to_vec().into(),
        Values::BF16(values) => values.to_vec().into(),
    }
}

/// A gather that is under way.
#[derive(Debug)]
pub(crate) enum Arriving {
    /// A gather into buffers of this rank, which go back into the loan.
    Own(Pending<Vec<HostBuffer>>, Pooled),
    /// A gather into buffers that all ranks read.
    Shared(Pending<Option<Arc<Pooled>>>),
    /// A gather into a buffer of this rank on a device.
    Device(There<Pending<DeviceBuffer>>),
}

impl Arriving {
    /// Issues a gather of this rank's shard of a unit.
    ///
    /// # Errors
    /// If there is no memory for the unit; errors of the operation.
    pub(crate) fn issue(
        context: &Context,
        step: u64,
        microbatch: usize,
        unit: UnitId,
        phase: Phase,
        shard: &Shard,
    ) -> Result<Self, Error> {
        let tag = context.tag(Some(unit), Stage::Gather, step, microbatch);
        let event = Event::Gather { unit, microbatch, phase };
        let site = context.site("gather", step);
        let layout = Arc::clone(context.plan.layout(unit));
        let shard = match shard.gather_input() {
            Located::Host(shard) => shard,
            Located::Device(There { value: input, device }) => {
                context.events.push(event);
                let full = device.buffer(Category::Full, input.dtype(), layout.full_len());
                let full = full.map_err(|error| site.device(error))?;
                let value = context.gather.gather_unit_on_device(tag, layout, input, full)?;
                return Ok(Self::Device(There { value, device }));
            }
        };
        let compute = context.plan.compute_dtype(unit);
        let lens = context.plan.layout(unit).params().iter().map(|slot| slot.len);
        let lend = || context.full_pool.lend(compute, lens);
        match context.options.full_copies {
            FullCopies::PerRank => {
                let mut pooled = lend().map_err(|error| site.memory(unit, error))?;
                context.events.push(event);
                let targets = mem::take(&mut pooled.buffers);
                let pending = context.gather.gather_unit(tag, layout, shard, targets)?;
                Ok(Self::Own(pending, pooled))
            }
            FullCopies::PerProcess => {
                let holder = (context.gather.index() == 0).then(|| lend().map(Arc::new));
                let holder = holder.transpose().map_err(|error| site.memory(unit, error))?;
                context.events.push(event);
                let pending = context.gather.gather_unit_shared(tag, layout, shard, holder)?;
                Ok(Self::Shared(pending))
            }
        }
    }

    /// Waits for the gather; on a device until it is issued, and kernels that read the parameters
    /// wait for the rest. Returns `None` where an injected fault made this rank skip it.
    ///
    /// # Errors
    /// Errors of the operation.
    pub(crate) fn wait(self, context: &Context, unit: UnitId) -> Result<Option<Full>, Error> {
        let buffers = match self {
            Self::Own(pending, mut pooled) => {
                pooled.buffers = pending.wait()?;
                FullBuffers::Own(pooled)
            }
            Self::Shared(pending) => match pending.wait()? {
                Some(shared) => FullBuffers::Shared(shared),
                None => return Ok(None),
            },
            Self::Device(There { value, device }) => {
                let full = There { value: Arc::new(value.wait()?), device };
                FullBuffers::Device(DeviceFull { full, copies: OnceLock::new() })
            }
        };
        let layout = Arc::clone(context.plan.layout(unit));
        Ok(Some(Full { layout, dtype: context.plan.compute_dtype(unit), buffers }))
    }
}

impl Full {
    /// Returns the elements of the parameter with this index in its unit, in the compute dtype,
    /// row-major; empty after the buffer was [taken](Self::take).
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn values(&self, parameter: usize) -> Values<'_> {
        self.all()[parameter].values()
    }

    /// Returns the elements of an f32 parameter, row-major; `None` if the unit's compute dtype is
    /// not f32.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn as_f32(&self, parameter: usize) -> Option<&[f32]> {
        match self.values(parameter) {
            Values::F32(values) => Some(values),
            _ => None,
        }
    }

    /// Returns the parameter on the device, row-major; `None` in a model on the host. An operation
    /// that reads it on a stream waits for the gather on that stream.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn on_device(&self, parameter: usize) -> Option<DevicePart> {
        match &self.buffers {
            FullBuffers::Device(full) => {
                let range = self.layout.params()[parameter].range();
                Some(DevicePart::new(Arc::clone(&full.full.value), range))
            }
            FullBuffers::Own(_) | FullBuffers::Shared(_) => None,
        }
    }

    /// Takes a parameter's buffer, as the storage of a tensor for example; `None` if it was taken
    /// before. Each call gives a copy if [ranks share the buffers](crate::FullCopies::PerProcess),
    /// or if they lie on a device.
    ///
    /// [Put the buffer back](Self::put_back) when it is not used any more, so that another gather
    /// can use it.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn take(&mut self, parameter: usize) -> Option<HostBuffer> {
        let buffer = match &mut self.buffers {
            FullBuffers::Own(pooled) => {
                mem::replace(&mut pooled.buffers[parameter], HostBuffer::F32(Vec::new()))
            }
            FullBuffers::Shared(pooled) => pooled.buffers[parameter].clone(),
            FullBuffers::Device(full) => full.on_host(&self.layout)[parameter].clone(),
        };
        (!buffer.is_empty()).then_some(buffer)
    }

    /// Puts back a buffer that was taken. Its values do not matter, unless they are read through
    /// this value again.
    ///
    /// # Panics
    /// If the unit has no such parameter, or the buffer is not of the parameter's length and the
    /// compute dtype.
    pub fn put_back(&mut self, parameter: usize, buffer: HostBuffer) {
        let found = (buffer.dtype(), buffer.len());
        let expected = (self.dtype, self.layout.params()[parameter].len);
        assert!(
            found == expected,
            "put back {found:?}, but parameter {parameter} has {expected:?}"
        );
        if let FullBuffers::Own(pooled) = &mut self.buffers {
            pooled.buffers[parameter] = buffer;
        }
    }

    fn all(&self) -> &[HostBuffer] {
        match &self.buffers {
            FullBuffers::Own(pooled) => &pooled.buffers,
            FullBuffers::Shared(pooled) => &pooled.buffers,
            FullBuffers::Device(full) => full.on_host(&self.layout),
        }
    }
}
