//! A unit's parameters on this rank: the f32 master copy, and the copy that gathers read.

use std::sync::Arc;

use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{HostBuffer, SharedBuffer, ValuesMut, cast, copy_past_caches};
use hsdp_sharding::DType;

use crate::engine::device::DeviceShard;
use crate::engine::fabric::Fabric;
use crate::error::Error;

/// This rank's shard of one unit, where the model lies.
#[derive(Clone, Debug)]
pub(crate) enum Shard {
    Host(HostShard),
    Device(DeviceShard),
}

impl Shard {
    /// A shard of these f32 parameters, rounded too where the compute dtype is another.
    ///
    /// # Errors
    /// If there is no memory for it; those of a device.
    pub(crate) fn new(fabric: &Fabric, master: Vec<f32>) -> Result<Self, Error> {
        let compute = fabric.options.precision.parameters;
        Ok(match &fabric.device {
            Some(seat) => Self::Device(DeviceShard::new(fabric, seat, (master, compute))?),
            None => Self::Host(HostShard::new(master, compute)?),
        })
    }

    /// The f32 parameters: another handle to them, or a copy of those on a device.
    ///
    /// # Errors
    /// Those of a device.
    pub(crate) fn master(&self, fabric: &Fabric) -> Result<Arc<Vec<f32>>, Error> {
        match self {
            Self::Host(shard) => Ok(Arc::clone(&shard.master)),
            Self::Device(shard) => shard.to_host(fabric),
        }
    }

    /// Copies f32 parameters, from the `from`-th on.
    ///
    /// # Errors
    /// Those of a device.
    pub(crate) fn copy_to(
        &self,
        fabric: &Fabric,
        from: usize,
        into: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            Self::Host(shard) => copy_past_caches(into, &shard.master[from..from + into.len()]),
            Self::Device(shard) => shard.copy_to(fabric, from, into)?,
        }
        Ok(())
    }
}

/// This rank's shard of one unit, on the host.
///
/// Both copies are written through [`exclusive`](Self::exclusive) and nothing else, so that they hold the same parameters.
#[derive(Clone, Debug)]
pub(crate) struct HostShard {
    master: Arc<Vec<f32>>,
    /// The master, rounded to the compute dtype; `None` where that is f32, and the master itself is gathered.
    gather_input: Option<SharedBuffer>,
}

impl HostShard {
    fn new(master: Vec<f32>, compute: DType) -> Result<Self, hsdp_kernels::Error> {
        let gather_input = match compute {
            DType::F32 => None,
            compute => Some(rounded(&master, compute)?.into()),
        };
        Ok(Self { master: Arc::new(master), gather_input })
    }

    /// The parameters in the compute dtype: another handle to the buffer that peers read in place.
    pub(crate) fn gather_input(&self) -> SharedBuffer {
        match &self.gather_input {
            Some(rounded) => rounded.clone(),
            None => Arc::clone(&self.master).into(),
        }
    }

    /// The f32 parameters and their copy in the compute dtype, for this rank alone.
    ///
    /// A step's end has waited for all of its gathers, so there is normally no other holder. Another holder (the user,
    /// or a gather of an aborted step that a peer still completes) keeps the old values, and this rank goes on with a
    /// copy.
    pub(crate) fn exclusive(&mut self) -> (&mut [f32], Option<ValuesMut<'_>>) {
        let master = {
            let _shard = memory::scope(Category::Shard);
            Arc::make_mut(&mut self.master)
        };
        let _gather_input = memory::scope(Category::GatherInput);
        (master, self.gather_input.as_mut().map(SharedBuffer::make_mut))
    }
}

fn rounded(master: &[f32], dtype: DType) -> Result<HostBuffer, hsdp_kernels::Error> {
    let _gather_input = memory::scope(Category::GatherInput);
    let mut rounded = HostBuffer::zeros(dtype, master.len())?;
    cast(rounded.values_mut(), master);
    Ok(rounded)
}
