//! Learning-rate schedules: pure functions of the number of updates so far.

use crate::options::allowed::Allowed;

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
    shape: Shape,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
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
        check(rate);
        Self { shape: Shape::Constant(rate) }
    }

    /// Returns a schedule with a linear warm-up to `peak` over the first `warmup` updates, then
    /// half a cosine down to `floor` at update `total`, and `floor` after that.
    ///
    /// # Panics
    /// If a rate is NaN, below 0, or not finite in f32: an optimizer would refuse it, and the floor
    /// only after many steps.
    #[must_use]
    pub fn warmup_cosine(peak: f64, floor: f64, warmup: u64, total: u64) -> Self {
        [peak, floor].into_iter().for_each(check);
        Self { shape: Shape::WarmupCosine { peak, floor, warmup, total } }
    }

    /// Returns the rate of the next update after `step` applied ones.
    #[must_use]
    pub fn at(self, step: u64) -> f64 {
        match self.shape {
            Shape::Constant(rate) => rate,
            Shape::WarmupCosine { peak, warmup, .. } if step < warmup => {
                peak * ratio(step + 1, warmup)
            }
            Shape::WarmupCosine { floor, total, .. } if step >= total => floor,
            Shape::WarmupCosine { peak, floor, warmup, total } => {
                let progress = ratio(step - warmup, total - warmup);
                floor + (peak - floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
        }
    }
}

fn check(rate: f64) {
    let allowed = Allowed::NotNegative;
    assert!(allowed.allows(rate), "learning rate {rate:?}: it must be {allowed}");
}

#[expect(clippy::cast_precision_loss, reason = "steps are far below 2^53")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
