//! Gradients that wait unsharded for the last microbatch (mode `Local`), summed in f32.

use std::sync::Arc;

use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, Fold, GradientValues, Wire, contribute};
use hsdp_sharding::{Plan, UnitId};

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

    /// Adds a microbatch's gradients of one unit.
    ///
    /// # Errors
    /// If there is no memory for a sum.
    pub(crate) fn add(
        &mut self,
        unit: UnitId,
        gradients: &UnitGradients,
    ) -> Result<(), hsdp_kernels::Error> {
        for (sum, gradient) in self.sums[unit.index()].iter_mut().zip(gradients) {
            if let Some(gradient) = gradient {
                add(sum, gradient.as_ref())?;
            }
        }
        Ok(())
    }

    /// Gives the sums of one unit away; parameters that never had a gradient have none.
    pub(crate) fn take(&mut self, unit: UnitId) -> UnitGradients {
        let give = |sum: &mut Option<Vec<f32>>| {
            sum.take().map(|sum| Arc::new(sum) as Arc<dyn GradientValues>)
        };
        self.sums[unit.index()].iter_mut().map(give).collect()
    }
}

fn add(
    sum: &mut Option<Vec<f32>>,
    gradient: &dyn GradientValues,
) -> Result<(), hsdp_kernels::Error> {
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
    Ok(())
}
