//! Gradients that wait unsharded for the last microbatch (mode `Local`), summed in f32.

use std::sync::Arc;

use hsdp_comm::NonFiniteAt;
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, Fold, GradientValues, Wire, contribute, first_non_finite};
use hsdp_sharding::{Plan, Rank, UnitId};

use crate::engine::reductions::UnitGradients;

/// One f32 sum a parameter, made when its first gradient comes.
#[derive(Debug)]
pub(crate) struct UnshardedGradients {
    sums: Vec<Vec<Option<Vec<f32>>>>,
}

impl UnshardedGradients {
    pub(crate) fn new(plan: &Plan) -> Self {
        let sums = plan.spec().units().iter().map(|unit| vec![None; unit.params.len()]).collect();
        Self { sums }
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
            let sum = add(sum, gradient)?;
            if let (None, Some(at)) = (found, first_non_finite(sum)) {
                let from = (!is_finite(gradient, at)).then_some(rank);
                found = Some(NonFiniteAt { param, from });
            }
        }
        Ok(found)
    }

    /// Gives the sums of one unit away; parameters that never had a gradient have none.
    pub(crate) fn take(&mut self, unit: UnitId) -> UnitGradients {
        let give = |sum: &mut Option<Vec<f32>>| {
            sum.take().map(|sum| Arc::new(sum) as Arc<dyn GradientValues>)
        };
        self.sums[unit.index()].iter_mut().map(give).collect()
    }
}

/// Adds a gradient to a sum, and gives the sum.
fn add<'a>(
    sum: &'a mut Option<Vec<f32>>,
    gradient: &dyn GradientValues,
) -> Result<&'a [f32], hsdp_kernels::Error> {
    let fold = if sum.is_some() { Fold::Add } else { Fold::Replace };
    let sum = match sum {
        Some(sum) => sum,
        None => {
            let _grad_full = memory::scope(Category::GradFull);
            sum.insert(hsdp_kernels::zeros(gradient.len())?)
        }
    };
    let mut start = 0;
    gradient.read(0..gradient.len(), &mut |values| {
        let end = start + values.len();
        contribute(&mut sum[start..end], values, Divisor::ONE, Wire::F32, fold);
        start = end;
    });
    Ok(sum)
}

/// Whether one element of a gradient is.
fn is_finite(gradient: &dyn GradientValues, at: usize) -> bool {
    let mut element = [0.0];
    gradient.read(at..at + 1, &mut |values| {
        contribute(&mut element, values, Divisor::ONE, Wire::F32, Fold::Replace);
    });
    element[0].is_finite()
}
