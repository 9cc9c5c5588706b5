//! How gradients are clipped, as numbers that the optimizer's pass applies.
//!
//! A gradient that was clipped several times is `clamp(gradient * factor, -limit, limit)` again, so
//! each parameter needs two numbers.

use crate::options::allowed::is_held_in_f32;

/// The way in which the divided gradient of a parameter is clipped: multiplied by the factor, and
/// then limited in magnitude.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Clip {
    factor: f32,
    limit: f32,
}

impl Clip {
    /// Returns the way of multiplying alone.
    pub(crate) fn by(factor: f32) -> Self {
        Self { factor, limit: f32::INFINITY }
    }

    pub(crate) fn apply(self, elements: &mut [f32]) {
        let Self { factor, limit } = self;
        elements.iter_mut().for_each(|it| *it = (*it * factor).clamp(-limit, limit));
    }

    /// Returns the magnitude of a clipped element. `sum` is the element before the division.
    pub(crate) fn magnitude(self, sum: f32, divisor: f64) -> f64 {
        let clipped = f64::from(sum) / divisor * f64::from(self.factor);
        clipped.abs().min(f64::from(self.limit))
    }

    pub(crate) fn scaled(self, by: f32) -> Self {
        // No limit stays none, also where the factor is 0.
        let limit = if self.limit.is_finite() { self.limit * by } else { self.limit };
        Self { factor: self.factor * by, limit }
    }

    pub(crate) fn limited(self, to: f32) -> Self {
        Self { limit: self.limit.min(to), ..self }
    }
}

/// How gradients are clipped besides [`Gradients::clip`](crate::Gradients::clip).
#[derive(Clone, Debug, Default)]
pub(crate) struct Clipping {
    /// Clips by the number of a parameter in the model; empty while one factor counts for all.
    pub(crate) of_parameters: Vec<Clip>,
    /// A line for each call, which ranks compare.
    pub(crate) lines: String,
}

/// Returns whether gradients can be clipped to `limit`: it is infinity, 0, or a number above 0 that
/// is not 0 in f32.
pub(crate) fn is_limit(limit: f64) -> bool {
    limit > f64::from(f32::MAX) || is_held_in_f32(limit)
}
