//! Initial values by candle-nn's hints, as functions of seed and name.

use candle_core::Shape;
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use hsdp_sharding::Param;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Returns the values of a parameter, row-major.
pub(super) fn values(param: &Param, init: Init, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(xxh3_64_with_seed(param.name.as_bytes(), seed));
    let distribution = Distribution::of(init, &Shape::from(param.shape.clone()));
    (0..param.numel()).map(|_| distribution.draw(&mut rng)).collect()
}

#[derive(Clone, Copy)]
enum Distribution {
    Constant(f64),
    Normal { mean: f64, deviation: f64 },
    Uniform { low: f64, high: f64 },
}

impl Distribution {
    fn of(init: Init, shape: &Shape) -> Self {
        match init {
            Init::Const(value) => Self::Constant(value),
            Init::Randn { mean, stdev } => Self::Normal { mean, deviation: stdev },
            Init::Uniform { lo, up } => Self::Uniform { low: lo, high: up },
            Init::Kaiming { dist, fan, non_linearity } => {
                #[expect(clippy::cast_precision_loss, reason = "a fan is a size of a dim")]
                let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
                let bound = 3_f64.sqrt() * deviation;
                match dist {
                    NormalOrUniform::Normal => Self::Normal { mean: 0.0, deviation },
                    NormalOrUniform::Uniform => Self::Uniform { low: -bound, high: bound },
                }
            }
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the one rounding to the master's dtype")]
    fn draw(self, rng: &mut ChaCha8Rng) -> f32 {
        let value = match self {
            Self::Constant(value) => value,
            Self::Normal { mean, deviation } => mean + deviation * standard_normal(rng),
            Self::Uniform { low, high } => low + (high - low) * rng.random::<f64>(),
        };
        value as f32
    }
}

/// Draws a number by the Box-Muller transform. One half of its pair is enough here.
fn standard_normal(rng: &mut ChaCha8Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::init::{
        DEFAULT_KAIMING_NORMAL, DEFAULT_KAIMING_UNIFORM, FanInOut, NonLinearity,
    };

    use super::*;
    use NormalOrUniform::Uniform;

    /// Returns minimum, maximum, mean and deviation.
    fn statistics(values: &[f32]) -> [f64; 4] {
        let of = |fold: fn(f64, f64) -> f64, start| {
            values.iter().map(|it| f64::from(*it)).fold(start, fold)
        };
        let count = values.len() as f64;
        let mean = of(|a, b| a + b, 0.0) / count;
        let variance = values.iter().map(|it| (f64::from(*it) - mean).powi(2)).sum::<f64>() / count;
        [of(f64::min, f64::INFINITY), of(f64::max, f64::NEG_INFINITY), mean, variance.sqrt()]
    }

    #[test]
    fn distributions_are_those_of_candle() {
        let fan_out = Init::Kaiming {
            dist: NormalOrUniform::Normal,
            fan: FanInOut::FanOut,
            non_linearity: NonLinearity::Tanh,
        };
        let inits = [
            Init::Const(0.25),
            Init::Randn { mean: 3.0, stdev: 0.5 },
            Init::Uniform { lo: -1.0, up: 3.0 },
            DEFAULT_KAIMING_NORMAL,
            DEFAULT_KAIMING_UNIFORM,
            fan_out,
        ];
        let shape = [40, 60, 3, 5];
        for init in inits {
            let ours = values(&Param::new("conv.weight", shape), init, 1);
            let candles = init.var(&shape[..], DType::F32, &Device::Cpu).expect("36000 elements");
            let candles = candles.flatten_all().and_then(|it| it.to_vec1()).expect("f32");
            let [ours, candles] = [&ours, &candles].map(|values| statistics(values));
            let [.., deviation] = candles;
            for (place, (ours, candles)) in ours.into_iter().zip(candles).enumerate() {
                // candle's numbers are new in each run. Extremes of 36000 normal numbers vary by
                // 0.28 deviations (Gumbel), so the extremes of two draws are 2.5 apart once in 10^9
                // runs. Extremes of a uniform distribution are close to its ends.
                let tolerance = match (place, init) {
                    (0 | 1, Init::Uniform { .. } | Init::Kaiming { dist: Uniform, .. }) => {
                        0.05 * deviation
                    }
                    (0 | 1, _) => 2.5 * deviation,
                    _ => 0.03 * candles.abs().max(0.5),
                };
                assert!((ours - candles).abs() <= tolerance, "{init:?}: {ours} and {candles}");
            }
        }
    }

    #[test]
    fn values_depend_on_name_and_seed_only() {
        let of = |name: &str, seed| {
            values(&Param::new(name, [8]), Init::Randn { mean: 0.0, stdev: 1.0 }, seed)
        };
        assert_eq!(of("a", 1), of("a", 1));
        assert_ne!(of("a", 1), of("b", 1));
        assert_ne!(of("a", 1), of("a", 2));
    }
}
