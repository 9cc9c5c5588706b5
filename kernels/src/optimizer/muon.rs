//! The element-wise parts of the Muon update: before and after a matrix is orthogonalized.

use crate::optimizer::MomentumKind;
use crate::round::nearest_f32;
use crate::simd::vectorized;

/// The parameters of one Muon update (K. Jordan et al., "Muon: an optimizer for hidden layers in
/// neural networks", 2024; Liu et al., arXiv 2502.16982), in the order of operations of
/// `torch.optim.Muon`.
///
/// The factors that follow from them are computed in f64 and rounded to f32 once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonStep {
    /// The learning rate of this step, times the factor for the shape of the matrix.
    pub rate: f64,
    /// The weight decay, times the learning rate of this step: a parameter is multiplied by 1 -
    /// `decay`.
    pub decay: f64,
    /// The decay factor of the momentum.
    pub momentum: f64,
    /// Whether the direction looks one step ahead.
    pub kind: MomentumKind,
    /// The factor by which gradients are multiplied first; 1 leaves them unchanged.
    pub clip: f32,
}

/// Replaces `direction`, which holds a gradient, by the direction that is orthogonalized. Both
/// slices have one length. The momentum does not change: [`muon`] changes it, when the update is
/// certain.
///
/// With `g = clip * gradient`, for each element, in this order and in f32:
///
/// ```text
/// m' = m + (1 - momentum) * (g - m)
/// d  = m'  or, with Nesterov,  m' + (1 - momentum) * (g - m')
/// ```
///
/// # Panics
///
/// If the slices differ in length.
pub fn muon_direction(step: &MuonStep, direction: &mut [f32], momentum: &[f32]) {
    assert_eq!(momentum.len(), direction.len(), "muon: lengths of momentum and direction differ");
    let factors = MuonFactors::of(step);
    let ahead = step.kind == MomentumKind::Nesterov;
    vectorized(
        #[inline(always)]
        move || {
            for (direction, &momentum) in direction.iter_mut().zip(momentum) {
                let gradient = *direction * factors.clip;
                let along = factors.towards(momentum, gradient);
                *direction = if ahead { factors.towards(along, gradient) } else { along };
            }
        },
    );
}

/// Makes one Muon update of a slice, along the orthogonalized direction. All slices have one
/// length.
///
/// With `g = clip * gradient`, for each element, in this order and in f32:
///
/// ```text
/// m = m + (1 - momentum) * (g - m)
/// p = p * (1 - decay) - rate * direction
/// ```
///
/// # Panics
///
/// If the slices differ in length.
pub fn muon(
    step: &MuonStep,
    parameter: &mut [f32],
    [gradient, direction]: [&[f32]; 2],
    momentum: &mut [f32],
) {
    let len = parameter.len();
    assert_eq!(gradient.len(), len, "muon: lengths of gradient and parameter differ");
    assert_eq!(direction.len(), len, "muon: lengths of direction and parameter differ");
    assert_eq!(momentum.len(), len, "muon: lengths of momentum and parameter differ");
    let factors = MuonFactors::of(step);
    vectorized(
        #[inline(always)]
        move || {
            let state = gradient.iter().zip(momentum);
            let elements = parameter.iter_mut().zip(direction).zip(state);
            for ((parameter, &direction), (&gradient, momentum)) in elements {
                *momentum = factors.towards(*momentum, gradient * factors.clip);
                *parameter = *parameter * factors.keep - factors.rate * direction;
            }
        },
    );
}

/// The factors of an element's update, each computed in f64 and rounded to f32 once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MuonFactors {
    pub(crate) clip: f32,
    pub(crate) take: f32,
    pub(crate) keep: f32,
    pub(crate) rate: f32,
}

impl MuonFactors {
    pub(crate) fn of(step: &MuonStep) -> Self {
        Self {
            clip: step.clip,
            take: nearest_f32(1.0 - step.momentum),
            keep: nearest_f32(1.0 - step.decay),
            rate: nearest_f32(step.rate),
        }
    }

    #[inline(always)]
    fn towards(self, from: f32, to: f32) -> f32 {
        from + self.take * (to - from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PyTorch's `lerp(start, end, weight)` is `end - (1 - weight) * (end - start)` for a weight of
    /// one half or more, and otherwise `start + weight * (end - start)`: in f64 both are the same.
    fn lerp(start: f64, end: f64, weight: f64) -> f64 {
        start + weight * (end - start)
    }

    fn values(seed: u32) -> Vec<f32> {
        let value = |index: u32| (index.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32;
        (0..1001).map(|index| value(index + seed) / f32::from(1_u16 << 15) / 256.0 - 1.0).collect()
    }

    #[test]
    fn an_update_is_that_of_the_formula_in_f64() {
        for kind in [MomentumKind::Classic, MomentumKind::Nesterov] {
            let step = MuonStep { rate: 0.02, decay: 1e-3, momentum: 0.95, kind, clip: 0.5 };
            let [parameters, gradient, momentum] = [1, 2, 3].map(values);
            let mut direction = gradient.clone();
            muon_direction(&step, &mut direction, &momentum);
            let mut moved = parameters.clone();
            let mut changed = momentum.clone();
            muon(&step, &mut moved, [&gradient, &direction], &mut changed);
            for index in 0..parameters.len() {
                let [p, g, m] =
                    [&parameters, &gradient, &momentum].map(|all| f64::from(all[index]));
                let g = 0.5 * g;
                let buffer = lerp(m, g, 1.0 - 0.95);
                let ahead = lerp(g, buffer, 0.95);
                let expected = if kind == MomentumKind::Nesterov { ahead } else { buffer };
                let close = |found: f32, expected: f64| (f64::from(found) - expected).abs() < 4e-7;
                assert!(close(direction[index], expected), "direction {index}");
                assert!(close(changed[index], buffer), "momentum {index}");
                let expected = p * (1.0 - 1e-3) - 0.02 * f64::from(direction[index]);
                assert!(close(moved[index], expected), "parameter {index}");
            }
        }
    }
}
