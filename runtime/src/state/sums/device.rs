//! Sums of gradients on a device, and their reductions.

use std::sync::Arc;

use hsdp_comm::{Contribution, DeviceAccumulator, DeviceReduced, Pending, Scaling, Tag};
use hsdp_kernels::cuda::{DeviceBuffer, FirstFound, Noted, Seen, WhatWasNoted};
use hsdp_kernels::memory::Category;
use hsdp_kernels::{Divisor, Fold};
use hsdp_sharding::{DType, ParamId, UnitId, UnitLayout};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::sighting::{Sighting, When};

/// This rank's sums of one unit's gradients, f32, and the notes of non-finite elements that were made
/// meanwhile.
#[derive(Debug)]
pub(crate) struct DeviceSums {
    pub(crate) values: DeviceBuffer,
    noted: Noted,
}

impl DeviceSums {
    pub(crate) fn new(context: &Context, len: usize, step: u64) -> Result<Self, Error> {
        let device = context.model_device();
        let make = || {
            let values = device.buffer(Category::Partial, DType::F32, len)?;
            Ok(Self { values, noted: Noted::new(&device.stream)? })
        };
        make().map_err(|error| context.site("reduction", step).device(error))
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn values(&self) -> &DeviceBuffer {
        &self.values
    }

    /// Clears the notes of another step.
    pub(crate) fn begin(&mut self, context: &Context, step: u64) -> Result<(), Error> {
        let cleared = self.noted.clear(&context.model_device().stream);
        cleared.map_err(|error| context.site("reduction", step).device(error))
    }

    pub(crate) fn scatter(
        self,
        context: &Context,
        (tag, layout): (Tag, Arc<UnitLayout>),
        contribution: Contribution,
        fold: Fold,
    ) -> Result<DeviceScattering, Error> {
        let Self { values: partial, noted } = self;
        let accumulator = DeviceAccumulator { partial, fold, noted };
        let reduce = &context.reduce;
        Ok(DeviceScattering(reduce.reduce_unit_on_device(
            tag,
            layout,
            contribution,
            accumulator,
        )?))
    }

    pub(crate) fn all_reduce(
        self,
        context: &Context,
        tag: Tag,
        scaling: Scaling,
    ) -> Result<DeviceAllReducing, Error> {
        let Self { values, noted } = self;
        let pending = context.all_reduce.all_reduce_scaled_on_device(tag, values, scaling)?;
        Ok(DeviceAllReducing { pending, noted })
    }

    /// Adds other sums to these, or replaces these by them.
    pub(crate) fn fold_in(
        &mut self,
        context: &Context,
        (other, fold): (&Self, Fold),
        step: u64,
    ) -> Result<(), Error> {
        let all = 0..other.len();
        let added = context.model_device().stream.sum(
            &mut self.values,
            (&[&other.values], all),
            (Divisor::ONE, fold),
            None,
        );
        added.map_err(|error| context.site("reduction", step).device(error))
    }

    /// A copy on the host. Waits for the copy.
    pub(crate) fn to_host(&self, context: &Context, step: u64) -> Result<Vec<f32>, Error> {
        let copied = context.model_device().read_f32(&self.values);
        copied.map_err(|error| context.site("read", step).device(error))
    }

    /// Returns the squared norm of each, and its first element that is not finite. Waits for all
    /// work that is under way.
    pub(crate) fn survey(context: &Context, all: &[&Self], step: u64) -> Result<Vec<Seen>, Error> {
        let device = context.model_device();
        let values: Vec<&DeviceBuffer> = all.iter().map(|sums| &sums.values).collect();
        let seen = device.stream.inspect(&values, device.patience);
        seen.map_err(|error| context.site("norm", step).device(error))
    }

    /// The first sighting in the notes of these units. Waits for all work that is under way.
    pub(crate) fn sighting(
        context: &Context,
        all: &[(UnitId, &Self)],
        step: u64,
    ) -> Result<Option<Sighting>, Error> {
        let units = all.iter().map(|(unit, sums)| (*unit, &sums.noted)).collect::<Vec<_>>();
        first_noted(context, &units, (step, sighting_of_shard))
    }
}

/// Finds the sighting of an element that was noted in a sum, by its unit and its index.
type OfSum = fn(&Context, UnitId, FirstFound) -> Option<Sighting>;

/// The first sighting in notes; `of_sum` knows whether they are of a shard or of a whole unit.
pub(crate) fn first_noted(
    context: &Context,
    units: &[(UnitId, &Noted)],
    (step, of_sum): (u64, OfSum),
) -> Result<Option<Sighting>, Error> {
    if units.is_empty() {
        return Ok(None);
    }
    let (device, notes) =
        (context.model_device(), units.iter().map(|(_, noted)| *noted).collect::<Vec<_>>());
    let read = device.stream.read_noted(&notes, device.patience);
    let read = read.map_err(|error| context.site("check", step).device(error))?;
    let sightings = units.iter().zip(read).flat_map(|((unit, _), noted)| {
        let WhatWasNoted { contribution, sum } = noted;
        let own = contribution.and_then(|found| sighting_of_contribution(context, *unit, found));
        [own, sum.and_then(|found| of_sum(context, *unit, found))]
    });
    Ok(sightings.flatten().min())
}

/// The sighting of an element of this rank's contribution that was not finite.
pub(crate) fn sighting_of_contribution(
    context: &Context,
    unit: UnitId,
    found: FirstFound,
) -> Option<Sighting> {
    let sighting = sighting_in_unit(context, unit, found)?;
    Some(Sighting { from: Some(context.rank().index()), ..sighting })
}

/// The sighting of an element of the unit's trainable region that was not finite.
pub(crate) fn sighting_in_unit(
    context: &Context,
    unit: UnitId,
    FirstFound { round, index }: FirstFound,
) -> Option<Sighting> {
    let slots = context.plan.layout(unit).params();
    let index = slots.iter().find(|slot| slot.range().contains(&index))?.index;
    let parameter = context.number_of(ParamId { unit, index });
    Some(Sighting { when: When::Microbatch(round), parameter, from: None })
}

/// The sighting of an element of this rank's shard that was not finite.
fn sighting_of_shard(
    context: &Context,
    unit: UnitId,
    FirstFound { round, index }: FirstFound,
) -> Option<Sighting> {
    let parameter = context.parameter_at(unit, index)?;
    Some(Sighting { when: When::Microbatch(round), parameter, from: None })
}

/// A reduce-scatter that is under way.
#[derive(Debug)]
pub(crate) struct DeviceScattering(Pending<DeviceReduced>);

impl DeviceScattering {
    pub(crate) fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    pub(crate) fn wait(self) -> Result<DeviceSums, Error> {
        let DeviceReduced { partial: values, noted } = self.0.wait()?;
        Ok(DeviceSums { values, noted })
    }
}

/// An all-reduce that is under way.
#[derive(Debug)]
pub(crate) struct DeviceAllReducing {
    pending: Pending<DeviceBuffer>,
    noted: Noted,
}

impl DeviceAllReducing {
    pub(crate) fn wait(self) -> Result<DeviceSums, Error> {
        let Self { pending, noted } = self;
        Ok(DeviceSums { values: pending.wait()?, noted })
    }
}
