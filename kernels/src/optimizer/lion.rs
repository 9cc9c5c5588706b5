//! The Lion update.

use crate::round::nearest_f32;
use crate::simd::vectorized;

/// The parameters of one Lion update (Chen et al., "Symbolic discovery of optimization algorithms",
/// arXiv 2302.06675).
///
/// The factors that follow from them are computed in f64 and rounded to f32 once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionStep {
    /// The learning rate of this step: the distance by which each element moves.
    pub learning_rate: f64,
    /// The weight of the momentum in the direction of the update.
    pub beta1: f64,
    /// The decay factor of the momentum.
    pub beta2: f64,
    /// The weight decay; a parameter is multiplied by 1 - `learning_rate` * `weight_decay`.
    pub weight_decay: f64,
    /// The factor by which gradients are multiplied first; 1 leaves them unchanged.
    pub clip: f32,
}

/// Makes one Lion update of a slice. All slices have one length. The momentum starts as zeros.
///
/// With `g = clip * gradient`, for each element, in this order and in f32:
///
/// ```text
/// p = p * (1 - learning_rate * weight_decay)
/// c = beta1 * m + (1 - beta1) * g
/// p = p - learning_rate * sign(c)
/// m = beta2 * m + (1 - beta2) * g
/// ```
///
/// The sign of 0 and of NaN is 0.
///
/// # Panics
///
/// If the slices differ in length.
pub fn lion(step: &LionStep, parameter: &mut [f32], gradient: &[f32], momentum: &mut [f32]) {
    let len = parameter.len();
    assert_eq!(gradient.len(), len, "lion: lengths of gradient and parameter differ");
    assert_eq!(momentum.len(), len, "lion: lengths of momentum and parameter differ");
    let factors = LionFactors::of(step);
    vectorized(
        #[inline(always)]
        move || {
            let elements = parameter.iter_mut().zip(gradient).zip(momentum);
            for ((parameter, &gradient), momentum) in elements {
                factors.update(parameter, gradient, momentum);
            }
        },
    );
}

/// The factors of an element's update, each computed in f64 and rounded to f32 once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LionFactors {
    pub(crate) clip: f32,
    pub(crate) keep_parameter: f32,
    pub(crate) keep_direction: f32,
    pub(crate) take_direction: f32,
    pub(crate) keep_momentum: f32,
    pub(crate) take_momentum: f32,
    pub(crate) rate: f32,
}

impl LionFactors {
    pub(crate) fn of(step: &LionStep) -> Self {
        Self {
            clip: step.clip,
            keep_parameter: nearest_f32(1.0 - step.learning_rate * step.weight_decay),
            keep_direction: nearest_f32(step.beta1),
            take_direction: nearest_f32(1.0 - step.beta1),
            keep_momentum: nearest_f32(step.beta2),
            take_momentum: nearest_f32(1.0 - step.beta2),
            rate: nearest_f32(step.learning_rate),
        }
    }

    #[inline(always)]
    fn update(&self, parameter: &mut f32, gradient: f32, momentum: &mut f32) {
        let gradient = gradient * self.clip;
        let direction = self.keep_direction * *momentum + self.take_direction * gradient;
        // A difference of comparisons vectorizes, and is 0 for both zeros.
        let sign = f32::from(direction > 0.0) - f32::from(direction < 0.0);
        *parameter = *parameter * self.keep_parameter - self.rate * sign;
        *momentum = self.keep_momentum * *momentum + self.take_momentum * gradient;
    }
}

#[cfg(test)]
mod tests;
