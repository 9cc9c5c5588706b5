//! Gradients that wait unsharded for the last microbatch (mode `Local`), summed in f32.

mod device;

use std::sync::Arc;

use hsdp_comm::NonFiniteAt;
use hsdp_kernels::memory::Category;
use hsdp_kernels::{
    Divisor, Fold, GradientValues, Scaling, Wire, contribute, read_once, sum_contributions,
};
use hsdp_sharding::{Plan, Rank, Unit, UnitId};

use self::device::DeviceUnsharded;
use crate::error::Error;
use crate::state::context::Context;
use crate::state::sighting::Sighting;
use crate::state::store::zeros_in;
use crate::step::place::Place;
use crate::step::unit_gradients::UnitGradients;

/// Gradients that wait unsharded, where the model lies.
#[derive(Debug)]
pub(crate) enum Unsharded {
    Host(UnshardedGradients),
    Device(DeviceUnsharded),
}

impl Unsharded {
    /// Sums that belong to no step yet.
    pub(crate) fn new(plan: &Plan) -> Self {
        Self::Host(UnshardedGradients::new(plan))
    }

    /// Begins a step, in the buffers of the step before.
    pub(crate) fn begin(&mut self, context: &Context) {
        match self {
            // The former sums are in the device's pool already.
            _ if context.device.is_some() => {
                *self = Self::Device(DeviceUnsharded::new(&context.plan));
            }
            Self::Host(sums) => sums.empty(),
            Self::Device(_) => unreachable!("a model stays where it lies"),
        }
    }

    /// Adds the gradients that this rank has of one unit in a microbatch. Returns the first sum
    /// that is not finite, if there is one: after the reduction its microbatch is no longer known.
    /// A device notes it itself, and the step reads it at its end.
    ///
    /// # Errors
    /// If there is no memory for a sum; those of a device.
    pub(crate) fn add(
        &mut self,
        context: &Context,
        place: Place,
        (unit, gradients): (UnitId, &UnitGradients),
    ) -> Result<Option<NonFiniteAt>, Error> {
        match self {
            Self::Host(sums) => {
                let added = sums.add(context.rank(), unit, gradients);
                let site = context.site("accumulation", place.step);
                added.map_err(|error| site.memory(unit, error))
            }
            Self::Device(sums) => sums.add(context, place, (unit, gradients)).map(|()| None),
        }
    }

    /// Gives the sums of one unit away; parameters that never had a gradient have none.
    pub(crate) fn take(&mut self, plan: &Plan, unit: UnitId) -> UnitGradients {
        match self {
            Self::Host(sums) => sums.take(unit),
            Self::Device(sums) => sums.take(plan, unit),
        }
    }

    /// The first sighting that a device has noted in the sums.
    pub(crate) fn sighting(&self, context: &Context, step: u64) -> Result<Option<Sighting>, Error> {
        match self {
            Self::Host(_) => Ok(None),
            Self::Device(sums) => sums.sighting(context, step),
        }
    }
}

/// One f32 sum for each parameter, made when its first gradient comes.
#[derive(Debug)]
pub(crate) struct UnshardedGradients {
    /// By unit and parameter.
    sums: Vec<Vec<Sum>>,
}

/// The sum of a parameter's gradients in a step.
#[derive(Debug)]
struct Sum {
    /// Other ranks read it once it is given away. Before the first gradient it may be the buffer of
    /// the step before.
    buffer: Arc<Vec<f32>>,
    state: SumState,
}

/// The state of a sum in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SumState {
    /// No gradient has come.
    #[default]
    Nothing,
    /// It is the sum of the gradients so far.
    Some,
    /// It was given away. Another gradient begins a new sum.
    Given,
}

impl UnshardedGradients {
    pub(crate) fn new(plan: &Plan) -> Self {
        let none = || Sum { buffer: Arc::default(), state: SumState::Nothing };
        let of_unit = |unit: &Unit| unit.params.iter().map(|_| none()).collect();
        Self { sums: plan.spec().units().iter().map(of_unit).collect() }
    }

    /// Resets the sums for another step. Buffers that no rank reads any more are kept.
    pub(crate) fn empty(&mut self) {
        for sum in self.sums.iter_mut().flatten() {
            sum.state = SumState::Nothing;
            if Arc::get_mut(&mut sum.buffer).is_none() {
                sum.buffer = Arc::default();
            }
        }
    }

    /// Adds the gradients that `rank` has of one unit in a microbatch. Returns the first sum that
    /// is not finite, if there is one: after the reduction its microbatch is no longer known.
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
        let sums = self.sums[unit.index()].iter_mut().zip(&gradients.entries).enumerate();
        for (param, (sum, gradient)) in sums {
            let Some(gradient) = gradient.as_deref() else { continue };
            let non_finite = sum.add(param, gradient)?;
            if let (None, Some(at)) = (found, non_finite) {
                let from = (!is_finite(gradient, param, at)).then_some(rank);
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
    /// Adds the gradient of parameter `param`. Returns the first element of the sum that is not
    /// finite.
    fn add(
        &mut self,
        param: usize,
        gradient: &dyn GradientValues,
    ) -> Result<Option<usize>, hsdp_kernels::Error> {
        let fold = if self.state == SumState::Some { Fold::Add } else { Fold::Replace };
        let sum = self.exclusive(gradient.len())?;
        let mut non_finite = None;
        read_once(gradient, param, 0..gradient.len(), &mut |values| {
            non_finite = sum_contributions(sum, &[values], Scaling::on(Wire::F32), fold);
        });
        self.state = SumState::Some;
        Ok(non_finite)
    }

    /// The buffer, for this rank alone; a new one where another rank reads the old one, or it has
    /// another length.
    fn exclusive(&mut self, len: usize) -> Result<&mut Vec<f32>, hsdp_kernels::Error> {
        if Arc::get_mut(&mut self.buffer).is_none_or(|buffer| buffer.len() != len) {
            self.buffer = Arc::new(zeros_in(Category::GradFull, len)?);
        }
        Ok(Arc::get_mut(&mut self.buffer).expect("there is no other handle"))
    }

    fn give(&mut self) -> Option<Arc<dyn GradientValues>> {
        if self.state != SumState::Some {
            return None;
        }
        self.state = SumState::Given;
        Some(Arc::clone(&self.buffer) as Arc<dyn GradientValues>)
    }
}

/// Whether one element of the gradient of parameter `param` is finite.
fn is_finite(gradient: &dyn GradientValues, param: usize, at: usize) -> bool {
    let mut element = [0.0];
    read_once(gradient, param, at..at + 1, &mut |values| {
        contribute(&mut element, values, Divisor::ONE, Wire::F32, Fold::Replace);
    });
    element[0].is_finite()
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use hsdp_kernels::Values;

    use super::*;

    /// A gradient that lends single elements not at all, and more of them in halves, against the
    /// contract.
    #[derive(Debug)]
    struct Halves(Vec<f32>);

    impl GradientValues for Halves {
        fn len(&self) -> usize {
            self.0.len()
        }

        fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
            let half = range.len() / 2;
            let halves = [range.start..range.start + half, range.start + half..range.end];
            halves
                .into_iter()
                .filter(|_| half > 0)
                .for_each(|part| visit(Values::F32(&self.0[part])));
        }
    }

    #[test]
    fn a_gradient_that_is_not_lent_once_and_whole_is_refused() {
        let gradient = Halves(vec![1.0; 8]);
        let added = catch_unwind(AssertUnwindSafe(|| {
            let mut sum = Sum { buffer: Arc::default(), state: SumState::Nothing };
            sum.add(2, &gradient)
        }));
        assert!(added.is_err(), "{added:?}");
        let looked = catch_unwind(AssertUnwindSafe(|| is_finite(&gradient, 2, 0)));
        assert!(looked.is_err(), "{looked:?}");
    }
}
