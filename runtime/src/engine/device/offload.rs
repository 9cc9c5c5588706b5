//! Updates on the host of a unit whose sums are on a device, and whose parameters are there or not.
//!
//! A unit at a time: its gradient comes, what is updated is updated, and what gathers read goes back.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, HostBuffer, Values, cast};
use hsdp_sharding::{DType, UnitLayout};

use crate::engine::device::shard::{DeviceShard, make_mut};
use crate::engine::device::{DeviceSeat, DeviceSums};
use crate::engine::fabric::Fabric;
use crate::error::Error;

/// Host memory through which units go, each as large as the largest unit needs: made when it is first used.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    gradient: Vec<f32>,
    master: Vec<f32>,
    rounded: Option<HostBuffer>,
}

impl DeviceShard {
    /// Has `update` change f32 parameters by sums of gradients, both on the host, and brings what it made to where it belongs. Waits for
    /// the sums, and nothing else.
    ///
    /// # Errors
    /// Those of the device: the unit is then as it was, or was changed as a whole on the host alone.
    pub(crate) fn update_on_host(
        &mut self,
        fabric: &Fabric,
        (sums, step): (&DeviceSums, u64),
        update: impl FnOnce(&mut [f32], &[f32]),
    ) -> Result<(), Error> {
        let updated = self.update_through_host(fabric, sums, update);
        updated.map_err(|error| fabric.device_error("optimizer step", step, error))
    }

    fn update_through_host(
        &mut self,
        fabric: &Fabric,
        sums: &DeviceSums,
        update: impl FnOnce(&mut [f32], &[f32]),
    ) -> Result<(), CudaError> {
        let (seat, mut scratch) = (fabric.seat(), fabric.seat().scratch.lock());
        let by = (&*seat.stream, seat.patience);
        let Scratch { gradient, master: through, rounded } = &mut *scratch;
        let trained = |layout: &UnitLayout| layout.trainable().shard_len;
        let gradient = &mut room(fabric, (Category::Partial, trained), gradient)[..sums.len()];
        sums.values().read_back_into(by, 0, gradient)?;
        match self {
            Self::There { .. } => {
                let (master, gather_input) = self.exclusive(seat)?;
                let through = room(fabric, (Category::Shard, UnitLayout::shard_len), through);
                let through = &mut through[..master.len()];
                master.read_back_into(by, 0, through)?;
                update(through, gradient);
                master.write(&seat.stream, Values::F32(through))?;
                let Some(gather_input) = gather_input else { return Ok(()) };
                seat.stream.narrow(gather_input, master, Divisor::ONE)
            }
            Self::Offloaded { master, gather_input } => {
                let master = {
                    let _shard = memory::scope(Category::Shard);
                    Arc::make_mut(master)
                };
                update(master, gradient);
                let gather_input = make_mut((seat, Category::GatherInput), gather_input)?;
                upload(fabric, (master, rounded), gather_input)
            }
        }
    }

    /// A shard whose master stays on the host.
    pub(super) fn offloaded(
        fabric: &Fabric,
        seat: &DeviceSeat,
        (master, compute): (Vec<f32>, DType),
    ) -> Result<Self, CudaError> {
        let mut gather_input = seat.buffer(Category::GatherInput, compute, master.len())?;
        let rounded = &mut seat.scratch.lock().rounded;
        upload(fabric, (&master, rounded), &mut gather_input)?;
        Ok(Self::Offloaded { master: Arc::new(master), gather_input: Arc::new(gather_input) })
    }
}

/// As many elements as the largest unit has.
fn room<'a>(
    fabric: &Fabric,
    (category, len): (Category, impl Fn(&UnitLayout) -> usize),
    scratch: &'a mut Vec<f32>,
) -> &'a mut [f32] {
    if scratch.is_empty() {
        let _scope = memory::scope(category);
        *scratch = vec![0.0; most(fabric, len)];
    }
    scratch
}

fn most(fabric: &Fabric, len: impl Fn(&UnitLayout) -> usize) -> usize {
    fabric.plan.layouts().iter().map(|layout| len(layout)).max().unwrap_or(0)
}

/// Brings parameters to the device, in its buffer's dtype: rounded on the host, so that fewer bytes go there.
fn upload(
    fabric: &Fabric,
    (master, rounded): (&[f32], &mut Option<HostBuffer>),
    gather_input: &mut DeviceBuffer,
) -> Result<(), CudaError> {
    let (seat, dtype) = (fabric.seat(), gather_input.dtype());
    if dtype == DType::F32 {
        return gather_input.write(&seat.stream, Values::F32(master));
    }
    let rounded = rounded.get_or_insert_with(|| {
        let _scope = memory::scope(Category::GatherInput);
        let len = most(fabric, UnitLayout::shard_len);
        HostBuffer::zeros(dtype, len).unwrap_or_else(|error| panic!("{error}"))
    });
    let all = 0..master.len();
    cast(rounded.values_mut().slice(all.clone()), master);
    gather_input.write(&seat.stream, rounded.values().slice(all))
}
