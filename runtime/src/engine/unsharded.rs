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
    pub(crate) fn add(&mut self, unit: UnitId, gradients: &UnitGradients) {
        for (sum, gradient) in self.sums[unit.index()].iter_mut().zip(gradients) {
            if let Some(gradient) = gradient {
                add(sum, gradient.as_ref());
            }
        }
    }

    /// Gives the sums of one unit away; parameters that never had a gradient have none.
    pub(crate) fn take(&mut self, unit: UnitId) -> UnitGradients {
        let give = |sum: &mut Option<Vec<f32>>| {
            sum.take().map(|sum| Arc::new(sum) as Arc<dyn GradientValues>)
        };
        self.sums[unit.index()].iter_mut().map(give).collect()
    }
}

fn add(sum: &mut Option<Vec<f32>>, gradient: &dyn GradientValues) {
    let fold = if sum.is_some() { Fold::Add } else { Fold::Replace };
    let sum = sum.get_or_insert_with(|| {
        let _grad_full = memory::scope(Category::GradFull);
        vec![0.0; gradient.len()]
    });
    let mut start = 0;
    gradient.read(0..gradient.len(), &mut |values| {
        let end = start + values.len();
        contribute(&mut sum[start..end], values, Divisor::ONE, Wire::F32, fold);
        start = end;
    });
}
