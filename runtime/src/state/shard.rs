//! A unit's parameters on this rank: the f32 master copy, and the copy that gathers read.

use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, HostBuffer, SharedBuffer, Values, ValuesMut, cast, unpack};
use hsdp_sharding::{DType, Offload, UnitId, UnitLayout};

use crate::error::Error;
use crate::state::context::ErrorSite;
use crate::state::model_device::{ModelDevice, Scratch};
use crate::state::store::{Located, There, zeros_in};
use crate::state::sums::GradientSums;

/// This rank's shard of one unit. Both copies hold the same parameters.
///
/// On the host both copies lie there, on a device both lie there, and where the parameters are
/// offloaded the master stays on the host.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    /// The f32 parameters: all of the shard, or on the host the trained ones alone, which are the
    /// first, if the others are stored in the compute dtype.
    master: Located<Arc<Vec<f32>>, Arc<DeviceBuffer>>,
    /// All parameters in the compute dtype; `None` where that is f32, and the master itself is
    /// gathered.
    rounded: Option<GatherInput>,
}

/// Parameters that peers read in place.
pub(crate) type GatherInput = Located<SharedBuffer, Arc<DeviceBuffer>>;

/// The update of a unit, where its master is updated.
pub(crate) trait ShardUpdate {
    /// Updates f32 parameters on the host, and rounds them where they are gathered from there.
    fn on_host(self, master: &mut [f32], rounded: Option<ValuesMut<'_>>, sums: &[f32]);

    /// Updates f32 parameters on a device, and rounds them if they are gathered rounded.
    ///
    /// # Errors
    /// Errors of the device.
    fn on_device(
        self,
        device: &ModelDevice,
        master: &mut DeviceBuffer,
        rounded: Option<&mut DeviceBuffer>,
        sums: &DeviceBuffer,
    ) -> Result<(), CudaError>;
}

impl Shard {
    /// Makes a unit's shard of these f32 parameters where the model lies, rounded too where the
    /// compute dtype is another. Parameters that are stored in the compute dtype are only rounded.
    ///
    /// # Errors
    /// If there is no memory for it; those of a device.
    pub(crate) fn new(
        site: ErrorSite<'_>,
        unit: UnitId,
        parameters: Vec<f32>,
    ) -> Result<Self, Error> {
        let context = site.context;
        let compute = context.plan.compute_dtype(unit);
        let layout = context.plan.layout(unit);
        match &context.device {
            None => Ok(Self::here(parameters, layout, compute)?),
            Some(device) => {
                Self::there(device, parameters, compute).map_err(|error| site.device(error))
            }
        }
    }

    fn here(
        parameters: Vec<f32>,
        layout: &UnitLayout,
        compute: DType,
    ) -> Result<Self, hsdp_kernels::Error> {
        let rounded = match compute {
            DType::F32 => None,
            compute => Some(rounded(&parameters, compute, Category::GatherInput)?),
        };
        let master = match layout.stored() {
            None => parameters,
            Some(_) => master_of(&parameters, layout, Category::Shard)?,
        };
        Ok(Self { master: Located::Host(Arc::new(master)), rounded })
    }

    fn there(
        device: &Arc<ModelDevice>,
        parameters: Vec<f32>,
        compute: DType,
    ) -> Result<Self, CudaError> {
        let there = |value| There { value: Arc::new(value), device: Arc::clone(device) };
        let len = parameters.len();
        if device.offload == Offload::All {
            let mut input = device.buffer(Category::GatherInput, compute, len)?;
            upload(device, &parameters, &mut device.scratch.lock().rounded, &mut input)?;
            let master = Located::Host(Arc::new(parameters));
            return Ok(Self { master, rounded: Some(Located::Device(there(input))) });
        }
        let mut master = device.buffer(Category::Shard, DType::F32, len)?;
        master.write(&device.stream, Values::F32(&parameters))?;
        let mut rounded = None;
        if compute != DType::F32 {
            let mut input = device.buffer(Category::GatherInput, compute, len)?;
            device.stream.narrow(&mut input, &master, Divisor::ONE)?;
            rounded = Some(Located::Device(there(input)));
        }
        Ok(Self { master: Located::Device(there(master)), rounded })
    }

    /// Makes a copy of parameters on the host that a shard of the unit there
    /// [takes](Self::take) later: of all its parameters, or of the trained ones. It is rounded only
    /// where the shard has no f32 master.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn to_take(
        parameters: Vec<f32>,
        layout: &UnitLayout,
    ) -> Result<Self, hsdp_kernels::Error> {
        let (rounded, master) = match layout.stored() {
            Some(stored) if parameters.len() > layout.master_len() => {
                let rounded = rounded(&parameters, stored, Category::Load)?;
                (Some(rounded), master_of(&parameters, layout, Category::Load)?)
            }
            _ => (None, parameters),
        };
        Ok(Self { master: Located::Host(Arc::new(master)), rounded })
    }

    /// Takes the parameters of another shard of the unit. On the host they are copied into the
    /// buffers of this shard: all of them, or the trained ones alone if the other has no others. On
    /// a device, where a copy could fail, the other shard replaces this one.
    pub(crate) fn take(&mut self, other: Self) {
        let (Located::Host(master), Located::Host(copy), None | Some(Located::Host(_))) =
            (&mut self.master, &other.master, &other.rounded)
        else {
            *self = other;
            return;
        };
        let masters = copy.len();
        if masters == 0 && other.rounded.is_none() {
            return;
        }
        let (master, rounded) = exclusive(master, &mut self.rounded);
        master[..masters].copy_from_slice(copy);
        match (rounded, &other.rounded) {
            (Some(into), Some(Located::Host(rounded))) => into.copy_from(rounded.values()),
            (Some(into), _) => cast(into.slice(0..masters), copy),
            (None, _) => {}
        }
    }

    /// Returns the parameters on the host, as they are kept: other handles to them, or a copy of
    /// those on a device.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn on_host(&self, site: ErrorSite<'_>) -> Result<HostShard, Error> {
        let master = match &self.master {
            Located::Host(master) => Arc::clone(master),
            there @ Located::Device(_) => {
                let copy = there.to_host(site, 0..there.len())?;
                Arc::new(copy.into_owned())
            }
        };
        let rounded = match &self.rounded {
            Some(Located::Host(rounded)) => Some(rounded.clone()),
            Some(Located::Device(_)) | None => None,
        };
        Ok(HostShard { master, rounded })
    }

    /// Returns the parameters in f32: another handle to them, or a copy of those that lie on a
    /// device or are stored in the compute dtype.
    ///
    /// # Errors
    /// If there is no memory for the copy; those of a device.
    pub(crate) fn in_f32(&self, site: ErrorSite<'_>) -> Result<Arc<Vec<f32>>, Error> {
        let HostShard { master, rounded } = self.on_host(site)?;
        let Some(rounded) = rounded.filter(|rounded| rounded.len() > master.len()) else {
            return Ok(master);
        };
        let mut copy = hsdp_kernels::zeros(rounded.len())?;
        let (masters, stored) = copy.split_at_mut(master.len());
        masters.copy_from_slice(&master);
        unpack(stored, rounded.values().slice(master.len()..rounded.len()));
        Ok(Arc::new(copy))
    }

    /// Copies f32 parameters, from the `from`-th on: parts of a single parameter.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn copy_to(
        &self,
        site: ErrorSite<'_>,
        from: usize,
        into: &mut [f32],
    ) -> Result<(), Error> {
        match &self.rounded {
            Some(Located::Host(stored)) if from >= self.master.len() => {
                unpack(into, stored.values().slice(from..from + into.len()));
                Ok(())
            }
            _ => self.master.copy_to(site, from, into),
        }
    }

    /// Returns the parameters in the compute dtype: another handle to the buffer that peers read in
    /// place.
    pub(crate) fn gather_input(&self) -> GatherInput {
        match (&self.rounded, &self.master) {
            (Some(rounded), _) => rounded.clone(),
            (None, Located::Host(master)) => Located::Host(Arc::clone(master).into()),
            (None, Located::Device(master)) => Located::Device(master.clone()),
        }
    }

    /// Has the parameters updated where their master is updated. On a device with offloaded
    /// optimizers the update is on the host: the gradient is copied there, and the new parameters
    /// go back. Waits for the copies to the host, and nothing else.
    ///
    /// A step's end has waited for all of its gathers, so there is normally no other holder of the
    /// parameters. Another holder (the user, or a gather of an aborted step that a peer still
    /// completes) keeps the old values, and this rank goes on with a copy.
    ///
    /// # Errors
    /// Errors of the device: the copy that is gathered may then be older than the parameters.
    pub(crate) fn update(
        &mut self,
        sums: &GradientSums,
        update: impl ShardUpdate,
    ) -> Result<(), CudaError> {
        match (&mut self.master, &mut self.rounded) {
            (Located::Host(master), Some(Located::Device(There { value: input, device }))) => {
                let mut scratch = device.scratch.lock();
                let Scratch { gradient, rounded, .. } = &mut *scratch;
                let gradient = read_gradient(device, sums.there(), gradient)?;
                let master = {
                    let _shard = memory::scope(Category::Shard);
                    Arc::make_mut(master)
                };
                update.on_host(master, None, gradient);
                upload(device, master, rounded, make_mut(device, Category::GatherInput, input)?)
            }
            (Located::Host(master), rounded) => {
                let (master, rounded) = exclusive(master, rounded);
                update.on_host(master, rounded, sums.here());
                Ok(())
            }
            (Located::Device(There { value: master, device }), rounded) => {
                let master = make_mut(device, Category::Shard, master)?;
                let rounded = match rounded {
                    Some(Located::Device(There { value: input, .. })) => {
                        Some(make_mut(device, Category::GatherInput, input)?)
                    }
                    Some(Located::Host(_)) | None => None,
                };
                if device.offload == Offload::None {
                    return update.on_device(device, master, rounded, sums.there());
                }
                let mut scratch = device.scratch.lock();
                let Scratch { gradient, master: through, .. } = &mut *scratch;
                let gradient = read_gradient(device, sums.there(), gradient)?;
                let through = &mut through[..master.len()];
                master.read_back_into(&device.stream, 0, through, device.patience)?;
                update.on_host(through, None, gradient);
                master.write(&device.stream, Values::F32(through))?;
                let Some(rounded) = rounded else { return Ok(()) };
                device.stream.narrow(rounded, master, Divisor::ONE)
            }
        }
    }
}

/// The parameters of a shard on the host.
pub(crate) struct HostShard {
    master: Arc<Vec<f32>>,
    rounded: Option<SharedBuffer>,
}

impl HostShard {
    /// Returns the parameters of a range: in f32, or in the compute dtype if that is their only
    /// copy.
    ///
    /// # Panics
    /// If some of them have an f32 master, and others have none.
    pub(crate) fn values(&self, range: Range<usize>) -> Values<'_> {
        match &self.rounded {
            Some(stored) if range.start >= self.master.len() => stored.values().slice(range),
            _ => Values::F32(&self.master[range]),
        }
    }
}

/// Returns both copies on the host, for this rank alone.
fn exclusive<'a>(
    master: &'a mut Arc<Vec<f32>>,
    rounded: &'a mut Option<GatherInput>,
) -> (&'a mut [f32], Option<ValuesMut<'a>>) {
    let master = {
        let _shard = memory::scope(Category::Shard);
        Arc::make_mut(master)
    };
    let _gather_input = memory::scope(Category::GatherInput);
    let rounded = match rounded {
        Some(Located::Host(rounded)) => Some(rounded.make_mut()),
        Some(Located::Device(_)) | None => None,
    };
    (master, rounded)
}

/// Returns a buffer to write to: a copy, if there is another holder.
fn make_mut<'a>(
    device: &ModelDevice,
    category: Category,
    buffer: &'a mut Arc<DeviceBuffer>,
) -> Result<&'a mut DeviceBuffer, CudaError> {
    if Arc::get_mut(buffer).is_none() {
        let all = 0..buffer.len();
        let mut copy = device.buffer(category, buffer.dtype(), all.len())?;
        copy.copy(&device.stream, all.clone(), buffer, all)?;
        *buffer = Arc::new(copy);
    }
    Ok(Arc::get_mut(buffer).expect("there is no other holder"))
}

/// Copies sums to the beginning of a buffer on the host. Waits for the copy.
fn read_gradient<'a>(
    device: &ModelDevice,
    sums: &DeviceBuffer,
    into: &'a mut [f32],
) -> Result<&'a [f32], CudaError> {
    let into = &mut into[..sums.len()];
    sums.read_back_into(&device.stream, 0, into, device.patience)?;
    Ok(into)
}

/// Copies a master to the device, in the dtype of the buffer there. It is rounded on the host, in
/// the buffer of `rounded` with that dtype, so that fewer bytes are copied.
fn upload(
    device: &ModelDevice,
    master: &[f32],
    rounded: &mut [HostBuffer],
    input: &mut DeviceBuffer,
) -> Result<(), CudaError> {
    if input.dtype() == DType::F32 {
        return input.write(&device.stream, Values::F32(master));
    }
    let of_dtype = rounded.iter_mut().find(|rounded| rounded.dtype() == input.dtype());
    let rounded = of_dtype.expect("there is one for each dtype in which a unit computes");
    let all = 0..master.len();
    cast(rounded.values_mut().slice(all.clone()), master);
    input.write(&device.stream, rounded.values().slice(all))
}

/// Returns a copy of the parameters that have an f32 master.
fn master_of(
    parameters: &[f32],
    layout: &UnitLayout,
    category: Category,
) -> Result<Vec<f32>, hsdp_kernels::Error> {
    let mut master = zeros_in(category, layout.master_len())?;
    master.copy_from_slice(&parameters[..layout.master_len()]);
    Ok(master)
}

fn rounded(
    master: &[f32],
    dtype: DType,
    category: Category,
) -> Result<GatherInput, hsdp_kernels::Error> {
    let mut rounded = {
        let _scope = memory::scope(category);
        HostBuffer::zeros(dtype, master.len())?
    };
    cast(rounded.values_mut(), master);
    Ok(Located::Host(rounded.into()))
}
