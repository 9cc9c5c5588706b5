//! The runtime's all-reduce: partials are divided, rounded to the wire, summed in member order and divided again.

use hsdp_kernels::{Fold, Values, sum_contributions};

use super::reduce::Combine;
use super::{Buffers, PerMember, Receivers, ReduceInPlace};
use crate::Scaling;
use crate::pattern::Pattern;

/// The contribution of a member to a scaled sum, which replaces its elements.
pub(crate) struct Scaled(pub(crate) Vec<f32>);

impl Buffers for Scaled {
    type Output = Vec<f32>;

    fn imagined(self, _pattern: &Pattern<'_>) -> Vec<f32> {
        self.0
    }
}

impl Combine<f32> for Scaling {
    fn combine(&self, target: &mut [f32], sources: &[&[f32]]) {
        let contributions: PerMember<_> = sources.iter().map(|it| Values::F32(it)).collect();
        // The reader of the result finds elements that are not finite.
        let _ = sum_contributions(target, &contributions, *self, Fold::Replace);
    }
}

/// Every member gets the scaled sum.
///
/// # Errors
/// If the vectors differ in length.
pub(crate) fn all_reduce_scaled(
    members: Vec<Scaled>,
    scaling: Scaling,
) -> Result<ReduceInPlace<f32, Scaling>, String> {
    let values = members.into_iter().map(|Scaled(values)| values).collect();
    ReduceInPlace::new(values, scaling, Receivers::All)
}
