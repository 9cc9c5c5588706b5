//! Dtypes of a model, and the loss scale that an f16 wire or f16 parameters need.

use hsdp_checkpoint::LossScaleHead;
use hsdp_sharding::DType;

use crate::error::Error;
use crate::options::allowed::is_positive_in_f32;

/// The dtypes of a model. Master parameters, partials and optimizer state are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The compute dtype, of the gathered parameters: f32, bf16 or f16. A unit may
    /// [declare](hsdp_sharding::Unit::compute_in) its own.
    pub parameters: DType,
    /// The dtype in which collectives move the gradients of all units: f32, bf16 or f16.
    pub wire: DType,
    /// The dtype to which an adapter casts the model's outputs; `None` leaves them as they are.
    pub output: Option<DType>,
}

impl Default for Precision {
    fn default() -> Self {
        Self { parameters: DType::F32, wire: DType::F32, output: None }
    }
}

impl Precision {
    /// Parameters and computation in the dtype `parameters`, gradients on the wire in f32.
    #[must_use]
    pub fn compute_in(parameters: DType) -> Self {
        Self { parameters, ..Self::default() }
    }

    pub(crate) fn check(self) -> Result<Self, Error> {
        for (what, dtype) in [("parameters", self.parameters), ("wire", self.wire)] {
            if !is_real(dtype) {
                return Err(Error::Options {
                    what: format!(
                        "{what} dtype {dtype}: gradients and parameters must be f32, bf16 or f16"
                    ),
                });
            }
        }
        Ok(self)
    }
}

fn is_real(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The factor by which losses are multiplied before the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum LossScaling {
    /// No factor.
    #[default]
    Off,
    /// A constant, which must be finite and above 0 in f32.
    Fixed(f64),
    /// A power of two that halves when a gradient overflows, and doubles after a number of steps
    /// without an overflow.
    Dynamic(DynamicScale),
}

/// The parameters of dynamic loss scaling. The defaults are those of PyTorch's `GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicScale {
    /// The scale of the first step; a power of two.
    pub initial: f64,
    /// The number of steps without an overflow after which the scale doubles; at least 1.
    pub growth_interval: u64,
    /// The lowest scale; a power of two, at most `initial`. If a step overflows at this scale, the
    /// policy [`ModelOptions::non_finite`](crate::ModelOptions::non_finite) applies.
    pub least: f64,
}

impl Default for DynamicScale {
    fn default() -> Self {
        Self { initial: 65536.0, growth_interval: 2000, least: 1.0 }
    }
}

impl LossScaling {
    pub(crate) fn check(self) -> Result<Self, Error> {
        let refuse = |what: String| Err(Error::Options { what });
        match self {
            Self::Fixed(scale) if !is_positive_in_f32(scale) => {
                refuse(format!("loss scale {scale}: it must be finite and above 0 in f32"))
            }
            Self::Dynamic(dynamic)
                if !(is_power_of_two(dynamic.initial) && is_power_of_two(dynamic.least)) =>
            {
                refuse(format!(
                    "dynamic loss scale from {} down to {}: both must be powers of two",
                    dynamic.initial, dynamic.least
                ))
            }
            Self::Dynamic(dynamic)
                if dynamic.initial > LARGEST_SCALE || dynamic.least < SMALLEST_SCALE =>
            {
                refuse(format!(
                    "dynamic loss scale from {:e} down to {:e}: both must be normal numbers in f32",
                    dynamic.initial, dynamic.least
                ))
            }
            Self::Dynamic(dynamic) if dynamic.initial < dynamic.least => refuse(format!(
                "dynamic loss scale from {} down to {}: an overflow would raise it",
                dynamic.initial, dynamic.least
            )),
            Self::Dynamic(dynamic) if dynamic.growth_interval == 0 => refuse(
                "dynamic loss scale with a growth interval of 0 steps: the minimum is 1".to_owned(),
            ),
            scaling => Ok(scaling),
        }
    }
}

/// The largest power of two in f32, in which losses are multiplied by the scale.
const LARGEST_SCALE: f64 = (1_u128 << 127) as f64;

/// The smallest power of two in f32 that is a normal number.
const SMALLEST_SCALE: f64 = 1.0 / (1_u128 << 126) as f64;

/// Returns whether a normal number is a power of two: its fraction is 0.
fn is_power_of_two(value: f64) -> bool {
    const FRACTION: u64 = (1 << (f64::MANTISSA_DIGITS - 1)) - 1;
    value.is_normal() && value > 0.0 && value.to_bits() & FRACTION == 0
}

/// The loss scale, which changes from step to step. The same on all ranks, because it depends only
/// on their agreement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CurrentScale {
    scaling: LossScaling,
    scale: f64,
    steps_since_change: u64,
}

impl CurrentScale {
    pub(crate) fn new(scaling: LossScaling) -> Self {
        let scale = match scaling {
            LossScaling::Off => 1.0,
            LossScaling::Fixed(scale) => scale,
            LossScaling::Dynamic(dynamic) => dynamic.initial,
        };
        Self { scaling, scale, steps_since_change: 0 }
    }

    pub(crate) fn value(&self) -> f64 {
        self.scale
    }

    /// Returns the state to save, if the scale is dynamic.
    pub(crate) fn saved(&self) -> Option<LossScaleHead> {
        let Self { scaling, scale: value, steps_since_change } = *self;
        matches!(scaling, LossScaling::Dynamic(_))
            .then_some(LossScaleHead { value, steps_since_change })
    }

    /// Returns the scale of another run, if the scale is dynamic in both runs; otherwise this
    /// scale.
    pub(crate) fn resumed(self, saved: Option<LossScaleHead>) -> Self {
        match (self.scaling, saved) {
            (LossScaling::Dynamic(dynamic), Some(LossScaleHead { value, steps_since_change }))
                if is_power_of_two(value) =>
            {
                let scale = value.clamp(dynamic.least, LARGEST_SCALE);
                Self { scale, steps_since_change, ..self }
            }
            _ => self,
        }
    }

    /// Returns whether an overflow is expected now and then, because the scale can still be halved.
    /// At the lowest scale an overflow has another cause.
    pub(crate) fn expects_overflow(&self) -> bool {
        matches!(self.scaling, LossScaling::Dynamic(dynamic) if self.scale > dynamic.least)
    }

    pub(crate) fn after_finite_step(&mut self) {
        let LossScaling::Dynamic(dynamic) = self.scaling else { return };
        self.steps_since_change += 1;
        // A larger scale would be infinite in f32, and every step would be skipped.
        if self.steps_since_change >= dynamic.growth_interval && self.scale < LARGEST_SCALE {
            self.scale *= 2.0;
            self.steps_since_change = 0;
        }
    }

    pub(crate) fn after_overflow(&mut self) {
        let LossScaling::Dynamic(dynamic) = self.scaling else { return };
        self.scale = (self.scale / 2.0).max(dynamic.least);
        self.steps_since_change = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dynamic(initial: f64, growth_interval: u64) -> CurrentScale {
        CurrentScale::new(LossScaling::Dynamic(DynamicScale {
            initial,
            growth_interval,
            least: 1.0,
        }))
    }

    #[test]
    fn a_scale_halves_on_overflow_and_doubles_after_the_interval() {
        let mut scale = dynamic(8.0, 2);
        scale.after_overflow();
        assert_eq!(scale.value(), 4.0);
        scale.after_finite_step();
        assert_eq!(scale.value(), 4.0);
        scale.after_finite_step();
        assert_eq!(scale.value(), 8.0);
    }

    #[test]
    fn a_scale_never_goes_below_its_least() {
        let mut scale = dynamic(2.0, 1);
        assert!(scale.expects_overflow());
        for _ in 0..5 {
            scale.after_overflow();
            assert!(!scale.expects_overflow(), "no smaller one could mend it");
        }
        assert_eq!(scale.value(), 1.0);
        scale.after_finite_step();
        assert!(scale.expects_overflow());
    }

    #[test]
    fn a_scale_is_taken_up_where_it_moved_and_moves() {
        let mut moved = dynamic(8.0, 3);
        moved.after_overflow();
        moved.after_finite_step();
        assert_eq!(dynamic(64.0, 3).resumed(moved.saved()).saved(), moved.saved());
        let fixed = CurrentScale::new(LossScaling::Fixed(128.0));
        assert_eq!(fixed.resumed(moved.saved()), fixed);
        assert_eq!(dynamic(64.0, 3).resumed(fixed.saved()), dynamic(64.0, 3));
    }

    #[test]
    fn a_fixed_scale_stays() {
        let mut scale = CurrentScale::new(LossScaling::Fixed(128.0));
        scale.after_overflow();
        scale.after_finite_step();
        assert_eq!(scale.value(), 128.0);
        assert!(!scale.expects_overflow());
    }

    #[test]
    fn a_scale_that_begins_below_its_least_is_refused() {
        let dynamic = DynamicScale { initial: 1.0, least: 4.0, ..DynamicScale::default() };
        let message = LossScaling::Dynamic(dynamic).check().unwrap_err().to_string();
        assert_eq!(message, "dynamic loss scale from 1 down to 4: an overflow would raise it");
    }

    #[test]
    fn what_is_no_power_of_two_is_refused() {
        let scaling =
            LossScaling::Dynamic(DynamicScale { initial: 1000.0, ..DynamicScale::default() });
        let message = scaling.check().unwrap_err().to_string();
        assert!(message.contains("1000"), "{message}");
    }
}
