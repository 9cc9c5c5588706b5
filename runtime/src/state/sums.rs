//! A rank's sums of gradients, by unit, where its part of the model lies: their reductions, the
//! first element that is not finite, and the buffers that wait for the next step.

use std::borrow::Borrow;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use hsdp_comm::{
    Accumulator, Contribution, DeviceAccumulator, DeviceReduced, NonFiniteAt, Pending, Reduced,
    Scaling, Tag,
};
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, FirstFound, Noted, Seen, WhatWasNoted};
use hsdp_kernels::memory::Category;
use hsdp_kernels::{Divisor, Fold, first_non_finite, settle, squared_norm};
use hsdp_sharding::{DType, ParamId, Plan, UnitId, UnitLayout};
use parking_lot::Mutex;

use crate::error::Error;
use crate::state::context::{Context, ErrorSite};
use crate::state::sighting::{Sighting, When};
use crate::state::store::{Located, There, zeros_in};

/// This rank's sums of one unit's gradients, in f32.
pub(crate) type GradientSums = Located<Vec<f32>, NotedSums>;

/// Sums on a device, and the notes of elements that were not finite.
#[derive(Debug)]
pub(crate) struct NotedSums {
    values: DeviceBuffer,
    noted: Noted,
}

impl Borrow<DeviceBuffer> for NotedSums {
    fn borrow(&self) -> &DeviceBuffer {
        &self.values
    }
}

impl GradientSums {
    /// Returns sums without memory.
    pub(crate) fn none() -> Self {
        Self::Host(Vec::new())
    }

    /// Returns these sums if they have length `len`, or else new ones, where the model lies.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn sized(
        self,
        site: ErrorSite<'_>,
        unit: UnitId,
        len: usize,
    ) -> Result<Self, Error> {
        let lies_there = matches!(self, Self::Device(_));
        if self.len() == len && lies_there == site.context.device.is_some() {
            return Ok(self);
        }
        let Some(device) = &site.context.device else {
            let zeros = zeros_in(Category::Partial, len);
            return zeros.map(Self::Host).map_err(|error| site.memory(unit, error));
        };
        let make = || {
            let values = device.buffer(Category::Partial, DType::F32, len)?;
            Ok(NotedSums { values, noted: Noted::new(&device.stream)? })
        };
        let value = make().map_err(|error| site.device(error))?;
        Ok(Self::Device(There { value, device: Arc::clone(device) }))
    }

    /// Prepares the sums for the first reduction of a step: clears the notes of another step.
    pub(crate) fn begin(&mut self) -> Result<(), CudaError> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(There { value, device }) => value.noted.clear(&device.stream),
        }
    }

    /// Issues the reduce-scatter of a microbatch into these sums.
    pub(crate) fn scatter(
        self,
        context: &Context,
        tag: Tag,
        layout: Arc<UnitLayout>,
        contribution: Contribution,
        fold: Fold,
    ) -> Result<SumsUnderWay, Error> {
        let reduce = &context.reduce;
        Ok(SumsUnderWay::Scattering(match self {
            Self::Host(partial) => {
                let into = Accumulator { partial, fold };
                Located::Host(reduce.reduce_unit(tag, layout, contribution, into)?)
            }
            Self::Device(There { value: NotedSums { values: partial, noted }, device }) => {
                let into = DeviceAccumulator { partial, fold, noted };
                let value = reduce.reduce_unit_on_device(tag, layout, contribution, into)?;
                Located::Device(There { value, device })
            }
        }))
    }

    /// Issues the all-reduce of these sums over the replicas.
    pub(crate) fn all_reduce(
        self,
        context: &Context,
        tag: Tag,
        scaling: Scaling,
    ) -> Result<SumsUnderWay, Error> {
        let group = &context.all_reduce;
        Ok(SumsUnderWay::OverReplicas(match self {
            Self::Host(partial) => Located::Host(group.all_reduce_scaled(tag, partial, scaling)?),
            Self::Device(There { value: NotedSums { values, noted }, device }) => {
                let pending = group.all_reduce_scaled_on_device(tag, values, scaling)?;
                Located::Device(There { value: NotedPending { pending, noted }, device })
            }
        }))
    }

    /// Issues the reduce-scatter of these sums of a unit over the replicas. The elements of other
    /// slices are old ones afterwards.
    pub(crate) fn scatter_over_replicas(
        self,
        context: &Context,
        tag: Tag,
        unit: UnitId,
        scaling: Scaling,
    ) -> Result<SumsUnderWay, Error> {
        let group = &context.all_reduce;
        let cuts = context.cuts(unit);
        Ok(SumsUnderWay::OverReplicas(match self {
            Self::Host(partial) => {
                Located::Host(group.reduce_scatter_scaled(tag, cuts, partial, scaling)?)
            }
            Self::Device(There { value: NotedSums { values, noted }, device }) => {
                let pending = group.reduce_scatter_scaled_on_device(tag, cuts, values, scaling)?;
                Located::Device(There { value: NotedPending { pending, noted }, device })
            }
        }))
    }

    /// Adds other sums to these, or replaces these by them: on the host the elements of a range, on
    /// a device all.
    pub(crate) fn fold_in(
        &mut self,
        other: &Self,
        range: Range<usize>,
        fold: Fold,
    ) -> Result<(), CudaError> {
        match self {
            Self::Host(sums) => {
                settle(&mut sums[range.clone()], &other.here()[range], Divisor::ONE, fold);
                Ok(())
            }
            Self::Device(There { value, device }) => {
                let other = other.there();
                let all = 0..other.len();
                device.stream.sum(&mut value.values, &[other], all, Divisor::ONE, fold, None)
            }
        }
    }

    /// Returns the norm and the first non-finite element of this rank's slice of each of these, by
    /// unit. The host searches for the element only where the norm is not finite. Waits for a
    /// device.
    ///
    /// # Errors
    /// If they lie on a device that fails.
    pub(crate) fn survey<'a>(site: ErrorSite<'_>, all: &'a [Self]) -> Result<Vec<Seen>, Error> {
        let Context { plan, .. } = site.context;
        let slice = |(unit, sums): (usize, &Self)| match sums.len() {
            0 => 0..0,
            _ => plan.slice(UnitId::new(unit), site.context.rank()),
        };
        let slices: Vec<Range<usize>> = all.iter().enumerate().map(slice).collect();
        let on_device = |(sums, slice): (&'a Self, &Range<usize>)| {
            sums.on_device().filter(|_| !slice.is_empty()).map(|there| (there, slice.clone()))
        };
        let there: Vec<_> = all.iter().zip(&slices).filter_map(on_device).collect();
        let mut found = Vec::new();
        if let Some((There { device, .. }, _)) = there.first() {
            let parts = there.iter().map(|(there, slice)| (&there.value.values, slice.clone()));
            let values: Vec<_> = parts.collect();
            let seen = device.stream.inspect(&values, device.patience);
            found = seen.map_err(|error| site.device(error))?;
        }
        let mut found = found.into_iter();
        let seen = |(sums, slice): (&Self, Range<usize>)| match sums {
            Self::Host(values) => seen_on_host(values, slice),
            Self::Device(_) if slice.is_empty() => seen_on_host(&[], 0..0),
            Self::Device(_) => found.next().expect("all that lie there were inspected"),
        };
        Ok(all.iter().zip(slices).map(seen).collect())
    }

    /// Returns the first element of these sums, by unit, that a device has noted as not finite.
    /// Waits for the notes.
    ///
    /// # Errors
    /// If they lie on a device that fails.
    pub(crate) fn sighting<'a>(
        site: ErrorSite<'_>,
        sums: impl Iterator<Item = (UnitId, &'a Self)>,
    ) -> Result<Option<Sighting>, Error> {
        let noted = sums.filter_map(|(unit, sums)| {
            let noted = &sums.on_device()?.value.noted;
            Some(NotedUnit { unit, noted })
        });
        first_noted(site, &noted.collect::<Vec<_>>(), sighting_of_shard)
    }

    fn on_device(&self) -> Option<&There<NotedSums>> {
        match self {
            Self::Host(_) => None,
            Self::Device(there) => Some(there),
        }
    }
}

fn seen_on_host(values: &[f32], slice: Range<usize>) -> Seen {
    let start = slice.start;
    let values = &values[slice];
    let squared_norm = squared_norm(values);
    let found = if squared_norm.is_finite() { None } else { first_non_finite(values) };
    Seen { squared_norm, first_non_finite: found.map(|index| (start + index) as u64) }
}

/// A reduction that is under way on the sums of a unit.
#[derive(Debug)]
pub(crate) enum SumsUnderWay {
    Scattering(Located<Pending<Reduced>, Pending<DeviceReduced>>),
    OverReplicas(Located<Pending<Vec<f32>>, NotedPending>),
}

/// A reduction over the replicas on a device, and the notes of the sums.
#[derive(Debug)]
pub(crate) struct NotedPending {
    pending: Pending<DeviceBuffer>,
    noted: Noted,
}

impl SumsUnderWay {
    /// Returns whether it is a reduce-scatter that is complete.
    pub(crate) fn is_scattered(&self) -> bool {
        match self {
            Self::Scattering(Located::Host(pending)) => pending.is_complete(),
            Self::Scattering(Located::Device(there)) => there.value.is_complete(),
            Self::OverReplicas(_) => false,
        }
    }

    /// Waits for the sums. Returns them, and the first element that a reduce-scatter on the host
    /// has found not to be finite. A device notes it itself, and the step reads it at its end.
    pub(crate) fn wait(self) -> Result<(GradientSums, Option<NonFiniteAt>), Error> {
        let (value, device) = match self {
            Self::Scattering(Located::Host(pending)) => {
                let Reduced { partial, non_finite } = pending.wait()?;
                return Ok((Located::Host(partial), non_finite));
            }
            Self::OverReplicas(Located::Host(pending)) => {
                return Ok((Located::Host(pending.wait()?), None));
            }
            Self::Scattering(Located::Device(There { value, device })) => {
                let DeviceReduced { partial: values, noted } = value.wait()?;
                (NotedSums { values, noted }, device)
            }
            Self::OverReplicas(Located::Device(There { value, device })) => {
                let NotedPending { pending, noted } = value;
                (NotedSums { values: pending.wait()?, noted }, device)
            }
        };
        Ok((Located::Device(There { value, device }), None))
    }
}

/// The notes of a unit's sums.
pub(crate) struct NotedUnit<'a> {
    pub(crate) unit: UnitId,
    pub(crate) noted: &'a Noted,
}

/// Finds the sighting of an element that was noted in a sum, by its unit and its index.
type OfSum = fn(&Context, UnitId, FirstFound) -> Option<Sighting>;

/// Returns the first sighting in notes of a device, for which the call waits; `of_sum` knows
/// whether they are of a shard or of a whole unit.
pub(crate) fn first_noted(
    site: ErrorSite<'_>,
    units: &[NotedUnit<'_>],
    of_sum: OfSum,
) -> Result<Option<Sighting>, Error> {
    let context = site.context;
    let Some(device) = context.device.as_ref().filter(|_| !units.is_empty()) else {
        return Ok(None);
    };
    let notes: Vec<_> = units.iter().map(|unit| unit.noted).collect();
    let read = device.stream.read_noted(&notes, device.patience);
    let read = read.map_err(|error| site.device(error))?;
    let sightings = units.iter().zip(read).flat_map(|(NotedUnit { unit, .. }, noted)| {
        let WhatWasNoted { contribution, sum } = noted;
        let own = contribution.and_then(|found| sighting_of_contribution(context, *unit, found));
        [own, sum.and_then(|found| of_sum(context, *unit, found))]
    });
    Ok(sightings.flatten().min())
}

/// Returns the sighting of an element of this rank's contribution that was not finite.
fn sighting_of_contribution(
    context: &Context,
    unit: UnitId,
    found: FirstFound,
) -> Option<Sighting> {
    let sighting = sighting_in_unit(context, unit, found)?;
    Some(Sighting { from: Some(context.rank().index()), ..sighting })
}

/// Returns the sighting of an element of the unit's trainable region that was not finite.
pub(crate) fn sighting_in_unit(
    context: &Context,
    unit: UnitId,
    FirstFound { round, index }: FirstFound,
) -> Option<Sighting> {
    let slots = context.plan.layout(unit).params();
    let index = slots.iter().position(|slot| slot.range().contains(&index))?;
    let parameter = context.number_of(ParamId { unit, index });
    Some(Sighting { when: When::Microbatch(round), parameter, from: None })
}

/// Returns the sighting of an element of this rank's shard that was not finite.
fn sighting_of_shard(
    context: &Context,
    unit: UnitId,
    FirstFound { round, index }: FirstFound,
) -> Option<Sighting> {
    let parameter = context.parameter_at(unit, index)?;
    Some(Sighting { when: When::Microbatch(round), parameter, from: None })
}

/// The sums of one model's steps, kept between the steps: fresh buffers would cost a pass of zeros.
#[derive(Debug, Default)]
pub(crate) struct SumsPool(Mutex<KeptSums>);

#[derive(Debug, Default)]
struct KeptSums {
    /// This rank's sums, by unit.
    sums: Option<Vec<GradientSums>>,
    /// Number of times that all buffers were released.
    generation: u64,
    forgotten: Forgotten,
}

/// Whether gradients were dropped without the update for which they were made.
#[derive(Clone, Copy, Debug, Default)]
enum Forgotten {
    #[default]
    None,
    /// Gradients of this step were dropped.
    Step(u64),
    /// The caller has been told, and is not told again.
    Told,
}

impl SumsPool {
    /// Returns the sums of a step before, by unit; empty ones if there are none.
    pub(crate) fn take(&self, plan: &Plan) -> Vec<GradientSums> {
        let none = || plan.spec().units().iter().map(|_| GradientSums::none()).collect();
        self.0.lock().sums.take().unwrap_or_else(none)
    }

    /// Returns the step whose gradients were dropped without an update: once, and the first such
    /// step.
    pub(crate) fn take_forgotten(&self) -> Option<u64> {
        let forgotten = &mut self.0.lock().forgotten;
        let Forgotten::Step(step) = *forgotten else { return None };
        *forgotten = Forgotten::Told;
        Some(step)
    }

    /// Forgets gradients that were dropped until now: their parameters have been replaced.
    pub(crate) fn forgive(&self) {
        let forgotten = &mut self.0.lock().forgotten;
        if let Forgotten::Step(_) = *forgotten {
            *forgotten = Forgotten::None;
        }
    }

    /// Releases the kept buffers, and those of gradients that still exist as soon as they are
    /// dropped.
    pub(crate) fn clear(&self) {
        let mut kept = self.0.lock();
        kept.generation += 1;
        let former = kept.sums.take();
        drop(kept);
        drop(former);
    }
}

/// The finished gradients of a step, by unit: this rank's shards, empty for units without any. When
/// they are dropped, their buffers serve another step.
#[derive(Debug)]
pub(crate) struct GradShards {
    sums: Vec<GradientSums>,
    /// By unit and parameter: whether it got a gradient on any rank in the step.
    pub(crate) present: Vec<Vec<bool>>,
    pool: Arc<SumsPool>,
    generation: u64,
    /// The step, until an optimizer has taken the gradients, if all ranks have agreed to apply
    /// them.
    awaits_update: Option<u64>,
}

impl GradShards {
    pub(crate) fn new(sums: Vec<GradientSums>, pool: &Arc<SumsPool>) -> Self {
        let generation = pool.0.lock().generation;
        Self { sums, present: Vec::new(), pool: Arc::clone(pool), generation, awaits_update: None }
    }

    /// Returns the sums of all units.
    pub(crate) fn all(&self) -> &[GradientSums] {
        &self.sums
    }

    /// Returns the sums of a unit.
    pub(crate) fn of(&self, unit: UnitId) -> &GradientSums {
        &self.sums[unit.index()]
    }

    /// Notes that an optimizer should take the gradients.
    pub(crate) fn await_update(&mut self, step: u64) {
        self.awaits_update = Some(step);
    }

    /// Notes that an optimizer has taken the gradients.
    pub(crate) fn taken(&mut self) {
        self.awaits_update = None;
    }
}

impl Drop for GradShards {
    fn drop(&mut self) {
        let mut kept = self.pool.0.lock();
        // A panic ends more than the step, and is told of itself.
        let forgotten = self.awaits_update.filter(|_| !thread::panicking());
        if let (Some(step), Forgotten::None) = (forgotten, kept.forgotten) {
            kept.forgotten = Forgotten::Step(step);
        }
        // If the gradients of another step are kept already, these are freed.
        if kept.sums.is_none() && kept.generation == self.generation {
            kept.sums = Some(mem::take(&mut self.sums));
        }
    }
}
