//! Updates on the host of a unit whose sums are on a device, and whose parameters are there or on the
//! host.
//!
//! One unit at a time: its gradient is copied to the host, the parameters are updated, and the gather
//! input goes back.

use std::sync::Arc;

use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, Values};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::scratch::Scratch;
use crate::state::shard::device::{DeviceShard, make_mut, upload};
use crate::state::sums::device::DeviceSums;

impl DeviceShard {
    /// Calls `update` with f32 parameters and sums of gradients, both on the host, and copies the
    /// new parameters to the device. Waits for the copies to the host, and nothing else.
    ///
    /// # Errors
    /// Errors of the device: the gather input may then be older than the parameters.
    pub(crate) fn update_on_host(
        &mut self,
        context: &Context,
        (sums, step): (&DeviceSums, u64),
        update: impl FnOnce(&mut [f32], &[f32]),
    ) -> Result<(), Error> {
        let updated = self.update_through_host(context, sums, update);
        updated.map_err(|error| context.site("optimizer step", step).device(error))
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
}
