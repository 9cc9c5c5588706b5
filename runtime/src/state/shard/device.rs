//! A unit's parameters on this rank's device: the f32 master copy, and the copy that gathers read.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_kernels::memory::Category;
use hsdp_kernels::{Divisor, HostBuffer, Values, cast, copy_past_caches};
use hsdp_sharding::{DType, Offload};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::model_device::ModelDevice;

/// This rank's shard of one unit. Both copies hold the same parameters.
#[derive(Clone, Debug)]
pub(crate) enum DeviceShard {
    /// The whole shard is on the device.
    There {
        master: Arc<DeviceBuffer>,
        /// The master, rounded to the compute dtype; `None` where that is f32, and the master itself
        /// is gathered.
        gather_input: Option<Arc<DeviceBuffer>>,
    },
    /// The master stays on the host.
    Offloaded { master: Arc<Vec<f32>>, gather_input: Arc<DeviceBuffer> },
}

impl DeviceShard {
    /// Copies a master, or only the gather input made of it, to the device.
    pub(crate) fn new(
        context: &Context,
        device: &ModelDevice,
        (master, compute): (Vec<f32>, DType),
    ) -> Result<Self, Error> {
        let placed = match device.offload {
            Offload::None | Offload::Optimizer => Self::there(device, (&master, compute)),
            Offload::All => Self::offloaded(device, (master, compute)),
        };
        placed.map_err(|error| context.site("init", 0).device(error))
    }

    /// Makes the whole shard on the device, rounded there where the compute dtype is another.
    fn there(device: &ModelDevice, (master, compute): (&[f32], DType)) -> Result<Self, CudaError> {
        let mut there = device.buffer(Category::Shard, DType::F32, master.len())?;
        there.write(&device.stream, Values::F32(master))?;
        let gather_input = match compute {
            DType::F32 => None,
            compute => Some(Arc::new(rounded(device, &there, compute)?)),
        };
        Ok(Self::There { master: Arc::new(there), gather_input })
    }

    /// Makes a shard whose master stays on the host.
    fn offloaded(
        device: &ModelDevice,
        (master, compute): (Vec<f32>, DType),
    ) -> Result<Self, CudaError> {
        let mut gather_input = device.buffer(Category::GatherInput, compute, master.len())?;
        upload(device, &master, &mut device.scratch.lock().rounded, &mut gather_input)?;
        Ok(Self::Offloaded { master: Arc::new(master), gather_input: Arc::new(gather_input) })
    }

    pub(crate) fn gather_input(&self) -> Arc<DeviceBuffer> {
        Arc::clone(match self {
            Self::There { master, gather_input } => gather_input.as_ref().unwrap_or(master),
            Self::Offloaded { gather_input, .. } => gather_input,
        })
    }

    /// Returns the f32 parameters on the host: a copy, for which the call waits, or the parameters
    /// that lie there.
    pub(crate) fn to_host(&self, context: &Context) -> Result<Arc<Vec<f32>>, Error> {
        match self {
            Self::There { master, .. } => context
                .model_device()
                .read_f32(master)
                .map(Arc::new)
                .map_err(|error| context.site("read", 0).device(error)),
            Self::Offloaded { master, .. } => Ok(Arc::clone(master)),
        }
    }

    /// Copies f32 parameters, from the `from`-th on, to the host. Waits for them.
    pub(crate) fn copy_to(
        &self,
        context: &Context,
        from: usize,
        into: &mut [f32],
    ) -> Result<(), Error> {
        let device = context.model_device();
        match self {
            Self::There { master, .. } => master
                .read_back_into((&device.stream, device.patience), from, into)
                .map_err(|error| context.site("read", 0).device(error)),
            Self::Offloaded { master, .. } => {
                copy_past_caches(into, &master[from..from + into.len()]);
                Ok(())
            }
        }
    }

    /// Returns the f32 parameters and their copy in the compute dtype, for this rank alone. Another
    /// holder of them keeps the old values, and this rank goes on with a copy.
    ///
    /// # Panics
    /// If the parameters are offloaded: these are updated where they lie.
    pub(crate) fn exclusive(
        &mut self,
        device: &ModelDevice,
    ) -> Result<(&mut DeviceBuffer, Option<&mut DeviceBuffer>), CudaError> {
        let Self::There { master, gather_input } = self else {
            unreachable!("an offloaded unit is updated on the host");
        };
        let master = make_mut((device, Category::Shard), master)?;
        let rounded = |all| make_mut((device, Category::GatherInput), all);
        let gather_input = gather_input.as_mut().map(rounded).transpose()?;
        Ok((master, gather_input))
    }
}

fn rounded(
    device: &ModelDevice,
    master: &DeviceBuffer,
    dtype: DType,
) -> Result<DeviceBuffer, CudaError> {
    let mut rounded = device.buffer(Category::GatherInput, dtype, master.len())?;
    device.stream.narrow(&mut rounded, master, Divisor::ONE)?;
    Ok(rounded)
}

/// Returns a buffer to write to: a copy, if there is another holder.
pub(super) fn make_mut<'a>(
    (device, category): (&ModelDevice, Category),
    buffer: &'a mut Arc<DeviceBuffer>,
) -> Result<&'a mut DeviceBuffer, CudaError> {
    if Arc::get_mut(buffer).is_none() {
        let (dtype, len) = (buffer.dtype(), buffer.len());
        let mut copy = device.buffer(category, dtype, len)?;
        copy.copy(&device.stream, 0..len, (buffer, 0..len))?;
        *buffer = Arc::new(copy);
    }
    Ok(Arc::get_mut(buffer).expect("there is no other holder"))
}

/// Copies a master to the device, in the dtype of the buffer there. It is rounded on the host, in
/// the buffer of `rounded` with that dtype, so that fewer bytes are copied.
pub(super) fn upload(
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
