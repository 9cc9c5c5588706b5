//! A unit's parameters on this rank: the f32 master copy, and the copy that gathers read.

pub(crate) mod device;
mod offload;

use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{HostBuffer, SharedBuffer, Values, ValuesMut, cast, copy_past_caches, unpack};
use hsdp_sharding::{DType, UnitId, UnitLayout};

use self::device::DeviceShard;
use crate::error::Error;
use crate::state::context::Context;

/// This rank's shard of one unit, where the model lies.
#[derive(Clone, Debug)]
pub(crate) enum Shard {
    Host(HostShard),
    Device(DeviceShard),
}

impl Shard {
    /// A unit's shard of these f32 parameters, rounded too where the compute dtype is another. Parameters that are stored in the
    /// compute dtype are only rounded.
    ///
    /// # Errors
    /// If there is no memory for it; those of a device.
    pub(crate) fn new(
        context: &Context,
        (unit, parameters): (UnitId, Vec<f32>),
    ) -> Result<Self, Error> {
        let compute = context.plan.compute_dtype(unit);
        Ok(match &context.device {
            Some(device) => Self::Device(DeviceShard::new(context, device, (parameters, compute))?),
            None => Self::Host(HostShard::new(parameters, context.plan.layout(unit), compute)?),
        })
    }

    /// The parameters as they are kept: other handles to them, or a copy of those on a device.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn kept(&self, context: &Context) -> Result<HostShard, Error> {
        Ok(match self {
            Self::Host(shard) => shard.clone(),
            Self::Device(shard) => {
                HostShard { master: shard.to_host(context)?, gather_input: None }
            }
        })
    }

    /// The parameters in f32: another handle to them, or a copy of those that lie on a device or are stored in the compute dtype.
    ///
    /// # Errors
    /// If there is no memory for the copy; those of a device.
    pub(crate) fn in_f32(&self, context: &Context) -> Result<Arc<Vec<f32>>, Error> {
        Ok(self.kept(context)?.in_f32()?)
    }

    /// Takes the parameters of a [copy](HostShard::to_take) into the buffers of this shard: all of
    /// them, or the trained ones alone if the copy has no others.
    ///
    /// # Panics
    /// If the shard is on a device.
    pub(crate) fn take(&mut self, copy: &HostShard) {
        let masters = copy.master.len();
        if masters == 0 && copy.gather_input.is_none() {
            return;
        }
        let Self::Host(shard) = self else { unreachable!("on a device a shard is made anew") };
        let (master, gather_input) = shard.exclusive();
        master[..masters].copy_from_slice(&copy.master);
        match (gather_input, &copy.gather_input) {
            (None, _) => {}
            (Some(gather_input), Some(rounded)) => gather_input.copy_from(rounded.values()),
            (Some(gather_input), None) => cast(gather_input.slice(0..masters), &copy.master),
        }
    }

    /// Copies f32 parameters, from the `from`-th on: parts of a single parameter.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn copy_to(
        &self,
        context: &Context,
        from: usize,
        into: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            Self::Host(shard) => match shard.values(from..from + into.len()) {
                Values::F32(values) => copy_past_caches(into, values),
                stored => unpack(into, stored),
            },
            Self::Device(shard) => shard.copy_to(context, from, into)?,
        }
        Ok(())
    }
}

/// This rank's shard of one unit, on the host.
///
/// Both copies are written through [`exclusive`](Self::exclusive) and nothing else, so that they hold the same parameters.
#[derive(Clone, Debug)]
pub(crate) struct HostShard {
    /// The f32 parameters: all of the shard, or the trained ones alone, which are the first.
    master: Arc<Vec<f32>>,
    /// All parameters, rounded to the compute dtype; `None` where that is f32, and the master itself is gathered.
    gather_input: Option<SharedBuffer>,
}

impl HostShard {
    fn new(
        parameters: Vec<f32>,
        layout: &UnitLayout,
        compute: DType,
    ) -> Result<Self, hsdp_kernels::Error> {
        let gather_input = match compute {
            DType::F32 => None,
            compute => Some(rounded(&parameters, compute, Category::GatherInput)?.into()),
        };
        let master = match layout.stored() {
            None => parameters,
            Some(_) => master_of(&parameters, layout, Category::Shard)?,
        };
        Ok(Self { master: Arc::new(master), gather_input })
    }

    /// Makes a copy of parameters that a shard of the unit takes later: of all its parameters, or
    /// of the trained ones. It is rounded only where the shard has no f32 master.
    pub(crate) fn to_take(
        parameters: Vec<f32>,
        layout: &UnitLayout,
    ) -> Result<Self, hsdp_kernels::Error> {
        match layout.stored() {
            Some(stored) if parameters.len() > layout.master_len() => Ok(Self {
                gather_input: Some(rounded(&parameters, stored, Category::Load)?.into()),
                master: Arc::new(master_of(&parameters, layout, Category::Load)?),
            }),
            _ => Ok(Self { master: Arc::new(parameters), gather_input: None }),
        }
    }

    /// The parameters of a range: in f32, or in the compute dtype if that is their only copy.
    ///
    /// # Panics
    /// If some of them have an f32 master, and others have none.
    pub(crate) fn values(&self, range: Range<usize>) -> Values<'_> {
        match &self.gather_input {
            Some(stored) if range.start >= self.master.len() => stored.values().slice(range),
            _ => Values::F32(&self.master[range]),
        }
    }

    /// The parameters in f32: the master, or a copy if it does not have all.
    fn in_f32(self) -> Result<Arc<Vec<f32>>, hsdp_kernels::Error> {
        let Some(gather_input) = self.gather_input else { return Ok(self.master) };
        let (all, masters) = (gather_input.len(), self.master.len());
        if masters == all {
            return Ok(self.master);
        }
        let mut copy = hsdp_kernels::zeros(all)?;
        copy[..masters].copy_from_slice(&self.master);
        unpack(&mut copy[masters..], gather_input.values().slice(masters..all));
        Ok(Arc::new(copy))
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

/// Returns a copy of the parameters that have an f32 master.
fn master_of(
    parameters: &[f32],
    layout: &UnitLayout,
    category: Category,
) -> Result<Vec<f32>, hsdp_kernels::Error> {
    let _scope = memory::scope(category);
    let mut master = hsdp_kernels::zeros(layout.master_len())?;
    master.copy_from_slice(&parameters[..layout.master_len()]);
    Ok(master)
}

fn rounded(
    master: &[f32],
    dtype: DType,
    category: Category,
) -> Result<HostBuffer, hsdp_kernels::Error> {
    let _scope = memory::scope(category);
    let mut rounded = HostBuffer::zeros(dtype, master.len())?;
    cast(rounded.values_mut(), master);
    Ok(rounded)
}
