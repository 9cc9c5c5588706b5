//! A unit's parameters on this rank: the f32 master copy, and the copy that gathers read.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{HostBuffer, SharedBuffer, Values, ValuesMut, cast, unpack};
use hsdp_sharding::{DType, Offload, UnitId, UnitLayout};

use crate::error::Error;
use crate::state::context::ErrorSite;
use crate::state::masters::HeldMasters;
use crate::state::model_device::{ModelDevice, Scratch};
use crate::state::store::{Located, There, zeros_in};
use crate::state::sums::GradientSums;

/// This rank's shard of one unit. Both copies hold the same parameters.
///
/// On the host both copies lie there, on a device both lie there, and where the parameters are
/// offloaded the master stays on the host.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    /// The f32 parameters: the trained ones of `held`, and behind them the frozen ones, unless
    /// these are stored in the compute dtype.
    master: Located<Arc<Vec<f32>>, Arc<DeviceBuffer>>,
    /// All parameters in the compute dtype; `None` where that is f32, and the master itself is
    /// gathered.
    rounded: Option<GatherInput>,
    held: HeldMasters,
}

/// Parameters that peers read in place.
pub(crate) type GatherInput = Located<SharedBuffer, Arc<DeviceBuffer>>;

/// Parameters in the compute dtype with one owner.
pub(crate) type OwnedInput = Located<HostBuffer, DeviceBuffer>;

/// The update of a unit, where its master is updated.
pub(crate) trait ShardUpdate {
    /// Updates elements on the host, from the `first`-th of the shard on, and rounds them where
    /// they are gathered from there. All slices have the same length.
    fn on_host(
        self,
        first: usize,
        master: &mut [f32],
        rounded: Option<ValuesMut<'_>>,
        sums: &[f32],
    );

    /// Updates f32 parameters on a device, and rounds them if they are gathered rounded. The master
    /// begins with the `first` element of the shard.
    ///
    /// # Errors
    /// Errors of the device.
    fn on_device(
        self,
        device: &ModelDevice,
        first: usize,
        master: &mut DeviceBuffer,
        rounded: Option<&mut DeviceBuffer>,
        sums: &DeviceBuffer,
    ) -> Result<(), CudaError>;
}

impl Shard {
    /// Makes a unit's shard of these f32 parameters where the model lies, rounded too where the
    /// compute dtype is another. Parameters that are stored in the compute dtype, or have their
    /// masters on other replicas, are only rounded.
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
        let masters = context.plan.layout(unit).master_len();
        let held = context.held(unit);
        match &context.device {
            None => Ok(Self::here(parameters, masters, held, compute)?),
            Some(device) => Self::there(site, device, parameters, held, compute),
        }
    }

    fn here(
        parameters: Vec<f32>,
        masters: usize,
        held: HeldMasters,
        compute: DType,
    ) -> Result<Self, hsdp_kernels::Error> {
        let rounded = match compute {
            DType::F32 => None,
            compute => Some(rounded(&parameters, compute, Category::GatherInput)?),
        };
        let master = held.of(parameters, masters, Category::Shard)?;
        Ok(Self { master: Located::Host(Arc::new(master)), rounded, held })
    }

    fn there(
        site: ErrorSite<'_>,
        device: &Arc<ModelDevice>,
        parameters: Vec<f32>,
        held: HeldMasters,
        compute: DType,
    ) -> Result<Self, Error> {
        let failed = |error| site.device(error);
        let there = |value| There { value: Arc::new(value), device: Arc::clone(device) };
        let len = parameters.len();
        let is_master_there = device.offload != Offload::All;
        let mut rounded = None;
        if !is_master_there || compute != DType::F32 {
            let mut input = device.buffer(Category::GatherInput, compute, len).map_err(failed)?;
            let mut copy = HostBuffer::zeros(compute, len)?;
            cast(copy.values_mut(), &parameters);
            input.write(&device.stream, copy.values()).map_err(failed)?;
            rounded = Some(Located::Device(there(input)));
        }
        let scope = if is_master_there { Category::Other } else { Category::Shard };
        let kept = held.of(parameters, len, scope)?;
        if !is_master_there {
            return Ok(Self { master: Located::Host(Arc::new(kept)), rounded, held });
        }
        let mut master = device.buffer(Category::Shard, DType::F32, kept.len()).map_err(failed)?;
        master.write(&device.stream, Values::F32(&kept)).map_err(failed)?;
        Ok(Self { master: Located::Device(there(master)), rounded, held })
    }

    /// Makes a copy of parameters on the host that a shard of the unit there
    /// [takes](Self::take) later: of all its parameters, or of the trained ones. It is rounded only
    /// where the shard has no f32 master of frozen ones.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn to_take(
        mut parameters: Vec<f32>,
        layout: &UnitLayout,
    ) -> Result<Self, hsdp_kernels::Error> {
        let all = layout.trainable().shard_len;
        let held = HeldMasters { trained: 0..all, all, are_divided: false };
        let mut stored = None;
        if let Some(dtype) = layout.stored()
            && parameters.len() > layout.master_len()
        {
            stored = Some(rounded(&parameters, dtype, Category::Load)?);
            let mut masters = zeros_in(Category::Load, layout.master_len())?;
            masters.copy_from_slice(&parameters[..layout.master_len()]);
            parameters = masters;
        }
        Ok(Self { master: Located::Host(Arc::new(parameters)), rounded: stored, held })
    }

    /// Takes the parameters of another shard of the unit, which has masters of all trained ones. On
    /// the host they are copied into the buffers of this shard: all of them, or the trained ones
    /// alone if the other has no others. On a device, where a copy could fail, the other shard
    /// replaces this one.
    pub(crate) fn take(&mut self, other: Self) {
        let (Located::Host(master), Located::Host(copy), None | Some(Located::Host(_))) =
            (&mut self.master, &other.master, &other.rounded)
        else {
            *self = other;
            return;
        };
        if copy.is_empty() && other.rounded.is_none() {
            return;
        }
        let HeldMasters { trained, all, .. } = &self.held;
        let (master, rounded) = exclusive(master, &mut self.rounded);
        let (held, frozen) = master.split_at_mut(trained.len());
        held.copy_from_slice(&copy[trained.clone()]);
        if copy.len() > *all {
            frozen.copy_from_slice(&copy[*all..]);
        }
        match (rounded, &other.rounded) {
            (Some(into), Some(Located::Host(rounded))) => into.copy_from(rounded.values()),
            (Some(into), _) => cast(into.slice(0..copy.len()), copy),
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
        Ok(HostShard { master, rounded, held: self.held.clone() })
    }

    /// Returns the number of parameters, with their padding.
    fn len(&self) -> usize {
        match &self.rounded {
            Some(Located::Host(rounded)) => rounded.len(),
            Some(Located::Device(There { value, .. })) => value.len(),
            None => self.master.len(),
        }
    }

    /// Returns the parameters in f32: another handle to them, or a copy of those that lie on a
    /// device or have no f32 master here.
    ///
    /// # Errors
    /// If there is no memory for the copy; those of a device.
    pub(crate) fn in_f32(&self, site: ErrorSite<'_>) -> Result<Arc<Vec<f32>>, Error> {
        match &self.master {
            Located::Host(master) if master.len() == self.len() => return Ok(Arc::clone(master)),
            _ => {}
        }
        let mut copy = hsdp_kernels::zeros(self.len())?;
        self.copy_to(site, 0, &mut copy)?;
        Ok(Arc::new(copy))
    }

    /// Returns whether each replica has the masters of its slice alone: the same on all ranks.
    pub(crate) fn divides_masters(&self) -> bool {
        self.held.are_divided
    }

    /// Returns the parameters that all replicas have, in f32: without the masters of trained ones
    /// if each replica has those of its slice alone.
    ///
    /// # Errors
    /// As [`in_f32`](Self::in_f32).
    pub(crate) fn shared_in_f32(&self, site: ErrorSite<'_>) -> Result<Arc<Vec<f32>>, Error> {
        if !self.held.are_divided {
            return self.in_f32(site);
        }
        let mut copy = hsdp_kernels::zeros(self.len())?;
        let (trained, frozen) = copy.split_at_mut(self.held.all);
        self.rounded_to(site, 0, trained)?;
        self.copy_to(site, self.held.all, frozen)?;
        Ok(Arc::new(copy))
    }

    /// Copies parameters in f32, from the `from`-th on. Those without an f32 master here are as
    /// they are gathered.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn copy_to(
        &self,
        site: ErrorSite<'_>,
        from: usize,
        into: &mut [f32],
    ) -> Result<(), Error> {
        let all = from..from + into.len();
        self.held.parts(all, self.master.len()).try_for_each(|(part, place)| {
            let into = &mut into[part.start - from..part.end - from];
            match place {
                Some(place) => self.master.copy_to(site, place, into),
                None => self.rounded_to(site, part.start, into),
            }
        })
    }

    /// Copies parameters as they are gathered, from the `from`-th on.
    fn rounded_to(&self, site: ErrorSite<'_>, from: usize, into: &mut [f32]) -> Result<(), Error> {
        let range = from..from + into.len();
        match &self.rounded {
            Some(Located::Host(rounded)) => unpack(into, rounded.values().slice(range)),
            Some(Located::Device(There { value, device })) => {
                let all = value.read_back(&device.stream, device.patience);
                let all = all.map_err(|error| site.device(error))?;
                unpack(into, all.values().slice(range));
            }
            None => unreachable!("parameters that are gathered in f32 have masters"),
        }
        Ok(())
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

    /// Takes the buffer that peers read in place, for a gather that writes to it. Until it
    /// [comes back](Self::take_back), no parameter can be read that has no other copy. Another
    /// holder keeps a copy of the present values.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn lend(&mut self) -> Result<OwnedInput, CudaError> {
        let Self { master, rounded, .. } = self;
        match (rounded, master) {
            (Some(Located::Host(rounded)), _) => {
                let category = Category::GatherInput;
                Ok(Located::Host(match rounded {
                    SharedBuffer::F32(values) => HostBuffer::F32(taken(category, values)),
                    SharedBuffer::F16(values) => HostBuffer::F16(taken(category, values)),
                    SharedBuffer::BF16(values) => HostBuffer::BF16(taken(category, values)),
                }))
            }
            (None, Located::Host(master)) => {
                Ok(Located::Host(HostBuffer::F32(taken(Category::Shard, master))))
            }
            (Some(Located::Device(There { value, device })), _) => {
                Ok(Located::Device(taken_there(device, Category::GatherInput, value)?))
            }
            (None, Located::Device(There { value, device })) => {
                Ok(Located::Device(taken_there(device, Category::Shard, value)?))
            }
        }
    }

    /// Takes a buffer back that it has [lent](Self::lend).
    pub(crate) fn take_back(&mut self, input: OwnedInput) {
        let Self { master, rounded, .. } = self;
        match (rounded, master, input) {
            (Some(Located::Host(own)), _, Located::Host(input)) => *own = input.into(),
            (None, Located::Host(own), Located::Host(HostBuffer::F32(input))) => {
                *own = Arc::new(input);
            }
            (Some(Located::Device(own)), _, Located::Device(input))
            | (None, Located::Device(own), Located::Device(input)) => {
                own.value = Arc::new(input.value);
            }
            _ => unreachable!("the buffer is the one that was lent"),
        }
    }

    /// Has parameters updated where their master is updated: the elements `updated` of the shard.
    /// On a device with offloaded optimizers the update is on the host: the gradient is copied
    /// there, and the new parameters go back. Waits for the copies to the host, and nothing else.
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
        updated: Range<usize>,
        update: impl ShardUpdate,
    ) -> Result<(), CudaError> {
        let first = updated.start;
        // The places of the elements among the masters.
        let masters = first - self.held.trained.start..updated.end - self.held.trained.start;
        match (&mut self.master, &mut self.rounded) {
            (Located::Host(master), Some(Located::Device(There { value: input, device }))) => {
                let mut scratch = device.scratch.lock();
                let Scratch { gradient, rounded, .. } = &mut *scratch;
                let gradient = read_gradient(device, sums.there(), updated, gradient)?;
                let master = {
                    let _shard = memory::scope(Category::Shard);
                    &mut Arc::make_mut(master)[masters]
                };
                update.on_host(first, master, None, gradient);
                let input = make_mut(device, Category::GatherInput, input)?;
                upload(device, master, rounded, input, first)
            }
            (Located::Host(master), rounded) => {
                let (master, rounded) = exclusive(master, rounded);
                let rounded = rounded.map(|all| all.slice(updated.clone()));
                update.on_host(first, &mut master[masters], rounded, &sums.here()[updated]);
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
                    let begin = self.held.trained.start;
                    return update.on_device(device, begin, master, rounded, sums.there());
                }
                let mut scratch = device.scratch.lock();
                let Scratch { gradient, master: through, .. } = &mut *scratch;
                let gradient = read_gradient(device, sums.there(), updated.clone(), gradient)?;
                let through = &mut through[..masters.len()];
                master.read_back_into(&device.stream, masters.start, through, device.patience)?;
                update.on_host(first, through, None, gradient);
                master.write_part(&device.stream, masters.start, Values::F32(through))?;
                let Some(rounded) = rounded else { return Ok(()) };
                device.stream.narrow_part(rounded, updated, master, masters)
            }
        }
    }
}

/// The parameters of a shard on the host.
#[derive(Clone)]
pub(crate) struct HostShard {
    master: Arc<Vec<f32>>,
    rounded: Option<SharedBuffer>,
    held: HeldMasters,
}

impl HostShard {
    /// Makes the parameters of a shard of masters of all of them.
    pub(crate) fn of_masters(master: Arc<Vec<f32>>) -> Self {
        let all = master.len();
        let held = HeldMasters { trained: 0..all, all, are_divided: false };
        Self { master, rounded: None, held }
    }

    /// Returns the parameters of a range: in f32, or in the compute dtype if that is their only
    /// copy.
    ///
    /// # Panics
    /// If some of them have an f32 master, and others have none.
    pub(crate) fn values(&self, range: Range<usize>) -> Values<'_> {
        let mut parts = self.held.parts(range.clone(), self.master.len());
        let Some((part, place)) = parts.next() else { return Values::F32(&[]) };
        assert!(part == range, "elements {range:?} of a shard are not kept in one place");
        match (place, &self.rounded) {
            (Some(place), _) => Values::F32(&self.master[place..place + range.len()]),
            (None, Some(rounded)) => rounded.values().slice(range),
            (None, None) => unreachable!("parameters that are gathered in f32 have masters"),
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

/// Returns the elements of a buffer that stays empty: a copy, if there is another holder.
fn taken<T: Clone>(category: Category, values: &mut Arc<Vec<T>>) -> Vec<T> {
    Arc::try_unwrap(mem::take(values)).unwrap_or_else(|shared| {
        let _scope = memory::scope(category);
        shared.to_vec()
    })
}

/// Returns a buffer on a device, in whose place an empty one stays: a copy, if there is another
/// holder.
fn taken_there(
    device: &Arc<ModelDevice>,
    category: Category,
    buffer: &mut Arc<DeviceBuffer>,
) -> Result<There<DeviceBuffer>, CudaError> {
    make_mut(device, category, buffer)?;
    let empty = Arc::new(device.buffer(category, buffer.dtype(), 0)?);
    let value = Arc::into_inner(mem::replace(buffer, empty));
    let value = value.expect("there is no other holder");
    Ok(There { value, device: Arc::clone(device) })
}

/// Copies elements of sums to the beginning of a buffer on the host. Waits for the copy.
fn read_gradient<'a>(
    device: &ModelDevice,
    sums: &DeviceBuffer,
    elements: Range<usize>,
    into: &'a mut [f32],
) -> Result<&'a [f32], CudaError> {
    let into = &mut into[..elements.len()];
    sums.read_back_into(&device.stream, elements.start, into, device.patience)?;
    Ok(into)
}

/// Copies masters to the elements from `first` on of the buffer on the device, in its dtype. They
/// are rounded on the host, in the buffer of `rounded` with that dtype, so that fewer bytes are
/// copied.
fn upload(
    device: &ModelDevice,
    master: &[f32],
    rounded: &mut [HostBuffer],
    input: &mut DeviceBuffer,
    first: usize,
) -> Result<(), CudaError> {
    if input.dtype() == DType::F32 {
        return input.write_part(&device.stream, first, Values::F32(master));
    }
    let of_dtype = rounded.iter_mut().find(|rounded| rounded.dtype() == input.dtype());
    let rounded = of_dtype.expect("there is one for each dtype in which a unit computes");
    let all = 0..master.len();
    cast(rounded.values_mut().slice(all.clone()), master);
    input.write_part(&device.stream, first, rounded.values().slice(all))
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
