//! The SGD update.

use crate::round::nearest_f32;
use crate::simd::vectorized;

/// The parameters of one SGD update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdStep {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// The decay factor of the velocity; used only with a velocity.
    pub momentum: f64,
    /// The kind of momentum; used only with a velocity.
    pub kind: MomentumKind,
    /// The weight decay: the factor with which a parameter is added to its gradient.
    pub weight_decay: f64,
    /// The factor by which gradients are multiplied first; 1 leaves them unchanged.
    pub clip: f32,
}

/// The way in which the velocity enters an SGD update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MomentumKind {
    /// The update follows the velocity.
    #[default]
    Classic,
    /// The update looks one step ahead: it follows the gradient plus `momentum` times the velocity.
    Nesterov,
}

/// Makes one SGD update of a slice. All slices have one length.
///
/// For each element, in this order and in f32:
///
/// ```text
/// g = clip * gradient + weight_decay * p
/// velocity = momentum * velocity + g
/// d = velocity  or, with Nesterov,  g + momentum * velocity
/// p = p - learning_rate * d
/// ```
///
/// Without a velocity, the second line is left out and `d = g`. A velocity starts as zeros, so the
/// first step is that of PyTorch with dampening 0.
///
/// # Panics
///
/// If the slices differ in length, or there is no velocity although `momentum` is not 0.
pub fn sgd(step: &SgdStep, parameter: &mut [f32], gradient: &[f32], velocity: Option<&mut [f32]>) {
    let len = parameter.len();
    assert_eq!(gradient.len(), len, "sgd: lengths of gradient and parameter differ");
    let factors = SgdFactors::of(step);
    let Some(velocity) = velocity else {
        assert!(step.momentum == 0.0, "sgd: momentum {} without a velocity", step.momentum);
        return vectorized(
            #[inline(always)]
            move || {
                for (parameter, &gradient) in parameter.iter_mut().zip(gradient) {
                    *parameter -= factors.rate * factors.decayed(gradient, *parameter);
                }
            },
        );
    };
    assert_eq!(velocity.len(), len, "sgd: lengths of velocity and parameter differ");
    let ahead = step.kind == MomentumKind::Nesterov;
    vectorized(
        #[inline(always)]
        move || {
            let SgdFactors { momentum, rate, .. } = factors;
            let elements = parameter.iter_mut().zip(gradient).zip(velocity);
            for ((parameter, &gradient), velocity) in elements {
                let gradient = factors.decayed(gradient, *parameter);
                *velocity = momentum * *velocity + gradient;
                let direction = if ahead { gradient + momentum * *velocity } else { *velocity };
                *parameter -= rate * direction;
            }
        },
    );
}

/// The factors of an element's update, each rounded to f32 once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SgdFactors {
    pub(crate) clip: f32,
    pub(crate) decay: f32,
    pub(crate) momentum: f32,
    pub(crate) rate: f32,
}

impl SgdFactors {
    pub(crate) fn of(step: &SgdStep) -> Self {
        Self {
            clip: step.clip,
            decay: nearest_f32(step.weight_decay),
            momentum: nearest_f32(step.momentum),
            rate: nearest_f32(step.learning_rate),
        }
    }

    #[inline(always)]
    fn decayed(&self, gradient: f32, parameter: f32) -> f32 {
        gradient * self.clip + self.decay * parameter
    }
}

#[cfg(test)]
mod tests;
