//! Gradients that wait unsharded on a device for the last microbatch (mode `Local`): the unit's
//! trainable region, summed in f32.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DevicePart, Noted, Notes};
use hsdp_kernels::memory::Category;
use hsdp_kernels::{Divisor, Fold, GradientValues};
use hsdp_sharding::{DType, Plan, UnitId};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::sighting::Sighting;
use crate::state::sums::{NotedUnit, first_noted, sighting_in_unit};
use crate::step::place::Place;
use crate::step::unit_gradients::UnitGradients;

/// The sums of all units.
#[derive(Debug)]
pub(crate) struct DeviceUnsharded {
    units: Vec<Option<Sum>>,
    /// The notes of sums that were given away.
    given: Vec<(UnitId, Noted)>,
}

/// The sum of a unit's gradients in a step.
#[derive(Debug)]
struct Sum {
    flat: DeviceBuffer,
    /// By parameter: whether it has got a gradient.
    has: Vec<bool>,
    noted: Noted,
}

impl DeviceUnsharded {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self { units: plan.spec().units().iter().map(|_| None).collect(), given: Vec::new() }
    }

    /// Adds the gradients of one unit in a microbatch: one launch to cast and lay them out, and one
    /// to add.
    pub(crate) fn add(
        &mut self,
        context: &Context,
        place: Place,
        (unit, gradients): (UnitId, &UnitGradients),
    ) -> Result<(), Error> {
        let added = self.add_on_device(context, place, (unit, gradients));
        added.map_err(|error| context.site("accumulation", place.step).device(error))
    }

    fn add_on_device(
        &mut self,
        context: &Context,
        place: Place,
        (unit, gradients): (UnitId, &UnitGradients),
    ) -> Result<(), CudaError> {
        let (device, layout) = (context.model_device(), context.plan.layout(unit));
        let mut flat = device.buffer(Category::GradFull, DType::F32, layout.trainable().len)?;
        let there: Vec<(usize, Option<&dyn GradientValues>)> = layout
            .params()
            .iter()
            .zip(&gradients.entries)
            .map(|(slot, gradient)| (slot.start, gradient.as_deref()))
            .collect();
        let sum = self.units[unit.index()].take();
        let mut noted = Noted::new(&device.stream)?;
        let (had, mut sums) = match sum {
            Some(sum) => (sum.has, Some((sum.flat, sum.noted))),
            None => (vec![false; gradients.entries.len()], None),
        };
        let round = place.microbatch;
        let notes = sums.as_mut().map_or(&mut noted, |(_, noted)| noted);
        let stream = &device.stream;
        stream.pack_gradients(
            &mut flat,
            &there,
            Divisor::ONE,
            Some(Notes { noted: notes, round }),
        )?;
        if let Some((mut sum, mut notes)) = sums {
            let into = Some(Notes { noted: &mut notes, round });
            let all = 0..flat.len();
            stream.sum(&mut sum, (&[&flat], all), (Divisor::ONE, Fold::Add), into)?;
            (flat, noted) = (sum, notes);
        }
        let has =
            had.iter().zip(&gradients.entries).map(|(had, now)| *had || now.is_some()).collect();
        self.units[unit.index()] = Some(Sum { flat, has, noted });
        Ok(())
    }

    /// Gives the sums of one unit away; parameters that never had a gradient have none.
    pub(crate) fn take(&mut self, plan: &Plan, unit: UnitId) -> UnitGradients {
        let layout = plan.layout(unit);
        let Some(Sum { flat, has, noted }) = self.units[unit.index()].take() else {
            return layout.params().iter().map(|_| None).collect();
        };
        self.given.push((unit, noted));
        let flat = Arc::new(flat);
        let part = |(slot, has): (&hsdp_sharding::ParamSlot, bool)| {
            let part = || DevicePart::new(Arc::clone(&flat), slot.range());
            has.then(|| Arc::new(part()) as Arc<dyn GradientValues>)
        };
        layout.params().iter().zip(has).map(part).collect()
    }

    /// The first sighting in the notes of sums that were given away. Waits for all work that is
    /// under way.
    pub(crate) fn sighting(&self, context: &Context, step: u64) -> Result<Option<Sighting>, Error> {
        let given = self.given.iter().map(|(unit, noted)| NotedUnit { unit: *unit, noted });
        first_noted(&context.site("check", step), &given.collect::<Vec<_>>(), sighting_in_unit)
    }
}
