//! The AdamW update.

use crate::round::nearest_f32;
use crate::simd::vectorized;

/// The parameters of one AdamW update.
///
/// The factors that follow from them are computed in f64 and rounded to f32 once, as in PyTorch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// The decay factor of the first moment.
    pub beta1: f64,
    /// The decay factor of the second moment.
    pub beta2: f64,
    /// The number that is added to the square root of the corrected second moment.
    pub epsilon: f64,
    /// The weight decay; a parameter is multiplied by 1 - `learning_rate` * `weight_decay`.
    pub weight_decay: f64,
    /// The number of this update, from 1.
    pub step: u64,
    /// The factor by which gradients are multiplied first; 1 leaves them unchanged.
    pub clip: f32,
}

/// Makes one AdamW update of a slice. All slices have one length.
///
/// With `g = clip * gradient`, for each element, in this order and in f32:
///
/// ```text
/// p = p * (1 - learning_rate * weight_decay)
/// m = beta1 * m + (1 - beta1) * g
/// v = beta2 * v + (1 - beta2) * g * g
/// p = p - (learning_rate / (1 - beta1^step)) * m / (sqrt(v) / sqrt(1 - beta2^step) + epsilon)
/// ```
///
/// # Panics
///
/// If the slices differ in length, or `step.step` is 0.
pub fn adamw(
    step: &AdamWStep,
    parameter: &mut [f32],
    gradient: &[f32],
    first_moment: &mut [f32],
    second_moment: &mut [f32],
) {
    let len = parameter.len();
    assert_eq!(gradient.len(), len, "adamw: lengths of gradient and parameter differ");
    assert_eq!(first_moment.len(), len, "adamw: lengths of first moment and parameter differ");
    assert_eq!(second_moment.len(), len, "adamw: lengths of second moment and parameter differ");
    let factors = AdamWFactors::of(step);
    vectorized(
        #[inline(always)]
        move || {
            let moments = first_moment.iter_mut().zip(second_moment);
            let elements = parameter.iter_mut().zip(gradient).zip(moments);
            for ((parameter, &gradient), (first, second)) in elements {
                factors.update(parameter, gradient, first, second);
            }
        },
    );
}

/// The factors of an element's update, each computed in f64 and rounded to f32 once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamWFactors {
    pub(crate) clip: f32,
    pub(crate) keep_parameter: f32,
    pub(crate) keep_first: f32,
    pub(crate) take_first: f32,
    pub(crate) keep_second: f32,
    pub(crate) take_second: f32,
    pub(crate) rate: f32,
    pub(crate) second_root: f32,
    pub(crate) epsilon: f32,
}

impl AdamWFactors {
    pub(crate) fn of(step: &AdamWStep) -> Self {
        assert!(step.step > 0, "adamw: steps are counted from 1");
        let first_correction = 1.0 - step.beta1.powf(step.step as f64);
        let second_correction = 1.0 - step.beta2.powf(step.step as f64);
        Self {
            clip: step.clip,
            keep_parameter: nearest_f32(1.0 - step.learning_rate * step.weight_decay),
            keep_first: nearest_f32(step.beta1),
            take_first: nearest_f32(1.0 - step.beta1),
            keep_second: nearest_f32(step.beta2),
            take_second: nearest_f32(1.0 - step.beta2),
            rate: nearest_f32(step.learning_rate / first_correction),
            second_root: nearest_f32(second_correction.sqrt()),
            epsilon: nearest_f32(step.epsilon),
        }
    }

    #[inline(always)]
    pub(super) fn update(
        &self,
        parameter: &mut f32,
        gradient: f32,
        first: &mut f32,
        second: &mut f32,
    ) {
        let gradient = gradient * self.clip;
        *first = self.keep_first * *first + self.take_first * gradient;
        *second = self.keep_second * *second + self.take_second * gradient * gradient;
        let scale = second.sqrt() / self.second_root + self.epsilon;
        *parameter = *parameter * self.keep_parameter - self.rate * *first / scale;
    }
}

#[cfg(test)]
mod tests;
