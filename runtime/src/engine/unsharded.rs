//! Gradients that wait unsharded for the last microbatch (mode `Local`), summed in f32.

use std::mem;
use std::sync::Arc;

use hsdp_comm::NonFiniteAt;
use hsdp_kernels::memory::Category;
use hsdp_kernels::{Divisor, Fold, GradientValues, Scaling, Wire, contribute, sum_contributions};
use hsdp_sharding::{Plan, Rank, Unit, UnitId};

use crate::engine::device::DeviceUnsharded;
use crate::engine::fabric::Fabric;
use crate::engine::place::Place;
use crate::engine::recycled::sized;
use crate::engine::reductions::UnitGradients;
use crate::error::Error;
use crate::non_finite::Sighting;

/// Gradients that wait unsharded, where the model lies.
#[derive(Debug)]
pub(crate) enum Unsharded {
    Host(UnshardedGradients),
    Device(DeviceUnsharded),
}

impl Unsharded {
    /// For a step, in the buffers of the step before.
    pub(crate) fn new(fabric: &Fabric, before: UnshardedGradients) -> Self {
        let seat = fabric.device.as_ref();
        match seat.map(|seat| DeviceUnsharded::new(&fabric.plan, seat)) {
            Some(unsharded) => Self::Device(unsharded),
            None => Self::Host(before.emptied()),
        }
    }

    /// Adds the gradients that this rank has of one unit in a microbatch. The first sum that is not finite then, if one is
    /// not: once they are reduced, nobody can say of which microbatch it was. On a device that is noted, and read when the step
    /// ends.
    ///
    /// # Errors
    /// If there is no memory for a sum; those of a device.
    pub(crate) fn add(
        &mut self,
        fabric: &Fabric,
        place: Place,
        (unit, gradients): (UnitId, &UnitGradients),
    ) -> Result<Option<NonFiniteAt>, Error> {
        match self {
            Self::Host(sums) => {
                let added = sums.add(fabric.rank(), unit, gradients);
                let at = (place.step, unit);
                added.map_err(|error| fabric.no_memory(error, "accumulation", at))
            }
            Self::Device(sums) => sums.add(fabric, place, (unit, gradients)).map(|()| None),
        }
    }

    /// Gives the sums of one unit away; parameters that never had a gradient have none.
    pub(crate) fn take(&mut self, plan: &Plan, unit: UnitId) -> UnitGradients {
        match self {
            Self::Host(sums) => sums.take(unit),
            Self::Device(sums) => sums.take(plan, unit),
        }
    }

    /// What a device has noted of them.
    pub(crate) fn sighting(&self, fabric: &Fabric, step: u64) -> Result<Option<Sighting>, Error> {
        match self {
            Self::Host(_) => Ok(None),
            Self::Device(sums) => sums.sighting(fabric, step),
        }
    }
}

/// One f32 sum a parameter, made when its first gradient comes.
#[derive(Debug)]
pub(crate) struct UnshardedGradients {
    /// By unit and parameter.
    sums: Vec<Vec<Sum>>,
}

/// What a parameter has got in a step.
#[derive(Debug)]
enum Sum {
    /// No gradient. A buffer of the step before may lie here for reuse.
    Nothing(Vec<f32>),
    /// The sum of some.
    Some(Vec<f32>),
    /// A sum that was given away, to be read.
    Given(Arc<Vec<f32>>),
}

impl UnshardedGradients {
    pub(crate) fn new(plan: &Plan) -> Self {
        let of_unit = |unit: &Unit| unit.params.iter().map(|_| Sum::Nothing(Vec::new())).collect();
        Self { sums: plan.spec().units().iter().map(of_unit).collect() }
    }

    /// The same for another step: nothing has come, and the buffers that nobody reads any more are there.
    pub(crate) fn emptied(mut self) -> Self {
        for sum in self.sums.iter_mut().flatten() {
            *sum = Sum::Nothing(match mem::replace(sum, Sum::Nothing(Vec::new())) {
                Sum::Nothing(buffer) | Sum::Some(buffer) => buffer,
                Sum::Given(buffer) => Arc::try_unwrap(buffer).unwrap_or_default(),
            });
        }
        self
    }

    /// Adds the gradients that `rank` has of one unit in a microbatch. The first sum that is not finite then, if one is
    /// not: once they are reduced, nobody can say of which microbatch it was.
    ///
    /// # Errors
    /// If there is no memory for a sum.
    pub(crate) fn add(
        &mut self,
        rank: Rank,
        unit: UnitId,
        gradients: &UnitGradients,
    ) -> Result<Option<NonFiniteAt>, hsdp_kernels::Error> {
        let mut found = None;
        let sums = self.sums[unit.index()].iter_mut().zip(gradients).enumerate();
        for (param, (sum, gradient)) in sums {
            let Some(gradient) = gradient.as_deref() else { continue };
            let non_finite = sum.add(gradient)?;
            if let (None, Some(at)) = (found, non_finite) {
                let from = (!is_finite(gradient, at)).then_some(rank);
                found = Some(NonFiniteAt { param, from });
            }
        }
        Ok(found)
    }

    /// Gives the sums of one unit away; parameters that never had a gradient have none.
    pub(crate) fn take(&mut self, unit: UnitId) -> UnitGradients {
        self.sums[unit.index()].iter_mut().map(Sum::give).collect()
    }
}

impl Sum {
    /// Adds a gradient; the first element that is not finite then.
    fn add(&mut self, gradient: &dyn GradientValues) -> Result<Option<usize>, hsdp_kernels::Error> {
        let (mut sum, fold) = match mem::replace(self, Self::Nothing(Vec::new())) {
            Self::Some(sum) => (sum, Fold::Add),
            Self::Nothing(buffer) => {
                (sized(buffer, gradient.len(), Category::GradFull)?, Fold::Replace)
            }
            Self::Given(_) => {
                (sized(Vec::new(), gradient.len(), Category::GradFull)?, Fold::Replace)
            }
        };
        let (mut start, mut non_finite) = (0, None);
        gradient.read(0..gradient.len(), &mut |values| {
            let end = start + values.len();
            let scaling = Scaling::on(Wire::F32);
            let found = sum_contributions(&mut sum[start..end], &[values], scaling, fold);
            non_finite = non_finite.or_else(|| Some(start + found?));
            start = end;
        });
        assert_eq!(start, gradient.len(), "elements that a gradient lent, of those that it has");
        *self = Self::Some(sum);
        Ok(non_finite)
    }

    fn give(&mut self) -> Option<Arc<dyn GradientValues>> {
        match mem::replace(self, Self::Nothing(Vec::new())) {
            Self::Some(sum) => {
                let sum = Arc::new(sum);
                *self = Self::Given(Arc::clone(&sum));
                Some(sum)
            }
            other => {
                *self = other;
                None
            }
        }
    }
}

/// Whether one element of a gradient is.
fn is_finite(gradient: &dyn GradientValues, at: usize) -> bool {
    let mut element = [0.0];
    gradient.read(at..at + 1, &mut |values| {
        contribute(&mut element, values, Divisor::ONE, Wire::F32, Fold::Replace);
    });
    element[0].is_finite()
}
