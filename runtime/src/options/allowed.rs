//! The numbers that an option may be, and learning rates: pure functions of the number of updates
//! so far.

use std::fmt::{self, Display};

use crate::error::Error;

/// The numbers that an option of an optimizer may be. Others would destroy the parameters, or mean
/// something else in f32, in which an update computes: an update with them is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Finite in f32.
    Finite,
    /// Finite in f32, and 0 or more.
    NotNegative,
    /// Finite in f32, and 0 or less.
    NotPositive,
    /// Finite and above 0 in f32.
    Positive,
    /// Above 0, and its square is finite and above 0 in f32.
    PositiveSquare,
    /// From 0 to below 1.
    Fraction,
}

impl Allowed {
    pub(crate) fn allows(self, value: f64) -> bool {
        match self {
            Self::Finite => in_f32(value).is_finite(),
            Self::NotNegative => in_f32(value).is_finite() && value >= 0.0,
            Self::NotPositive => in_f32(value).is_finite() && value <= 0.0,
            Self::Positive => is_positive_in_f32(value),
            Self::PositiveSquare => value > 0.0 && Self::Positive.allows(value * value),
            Self::Fraction => (0.0..1.0).contains(&value),
        }
    }

    /// Refuses a value of the option `name` of an optimizer or a group, `of`, that is not allowed.
    ///
    /// # Errors
    /// [`Error::Options`] that names it.
    pub(crate) fn check(self, of: &dyn Display, name: &str, value: f64) -> Result<(), Error> {
        if self.allows(value) {
            return Ok(());
        }
        Err(Error::Options { what: format!("{of} {name} {value:?}: it must be {self}") })
    }
}

#[expect(clippy::cast_possible_truncation, reason = "that is the question")]
pub(crate) fn in_f32(value: f64) -> f32 {
    value as f32
}

/// Returns whether a number is finite and above 0 in f32.
pub(crate) fn is_positive_in_f32(value: f64) -> bool {
    in_f32(value).is_finite() && in_f32(value) > 0.0
}

/// Returns whether a number is 0 or more, finite in f32, and 0 there only if it is 0.
pub(crate) fn is_held_in_f32(value: f64) -> bool {
    value == 0.0 || is_positive_in_f32(value)
}

impl Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finite => "finite in f32",
            Self::NotNegative => "finite in f32, and 0 or more",
            Self::NotPositive => "finite in f32, and 0 or less",
            Self::Positive => "finite and above 0 in f32",
            Self::PositiveSquare => "above 0, and its square finite and above 0 in f32",
            Self::Fraction => "0 or more, and below 1",
        })
    }
}

/// A learning rate for each update.
///
/// A schedule counts the updates that were applied,
/// [`applied_steps`](crate::ShardedModel::applied_steps): skipped steps change no parameter, and
/// must not use up the warm-up.
///
/// ```
/// use hsdp::LearningRate;
/// let rate = LearningRate::warmup_cosine(1e-3, 1e-4, 10, 110);
/// assert_eq!(rate.at(0), 1e-4);          // a tenth of the way up already
/// assert_eq!(rate.at(9), 1e-3);          // the peak
/// assert!((rate.at(60) - 5.5e-4).abs() < 1e-12); // half-way down
/// assert_eq!(rate.at(200), 1e-4);        // the floor, from then on
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    shape: RateShape,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum RateShape {
    Constant(f64),
    WarmupCosine { peak: f64, floor: f64, warmup: u64, total: u64 },
}

impl LearningRate {
    /// Returns a schedule with one rate for all updates.
    ///
    /// # Panics
    /// If the rate is NaN, below 0, or not finite in f32.
    #[must_use]
    pub fn constant(rate: f64) -> Self {
        check_rate(rate);
        Self { shape: RateShape::Constant(rate) }
    }

    /// Returns a schedule with a linear warm-up to `peak` over the first `warmup` updates, then
    /// half a cosine down to `floor` at update `total`, and `floor` after that.
    ///
    /// # Panics
    /// If a rate is NaN, below 0, or not finite in f32: an optimizer would refuse it, and the floor
    /// only after many steps.
    #[must_use]
    pub fn warmup_cosine(peak: f64, floor: f64, warmup: u64, total: u64) -> Self {
        [peak, floor].into_iter().for_each(check_rate);
        Self { shape: RateShape::WarmupCosine { peak, floor, warmup, total } }
    }

    /// Returns the rate of the next update after `step` applied ones.
    #[must_use]
    pub fn at(self, step: u64) -> f64 {
        match self.shape {
            RateShape::Constant(rate) => rate,
            RateShape::WarmupCosine { peak, warmup, .. } if step < warmup => {
                peak * ratio(step + 1, warmup)
            }
            RateShape::WarmupCosine { floor, total, .. } if step >= total => floor,
            RateShape::WarmupCosine { peak, floor, warmup, total } => {
                let progress = ratio(step - warmup, total - warmup);
                floor + (peak - floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
        }
    }
}

fn check_rate(rate: f64) {
    let allowed = Allowed::NotNegative;
    assert!(allowed.allows(rate), "learning rate {rate:?}: it must be {allowed}");
}

#[expect(clippy::cast_precision_loss, reason = "steps are far below 2^53")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
