//! Initial values, which depend on seed and name alone, so that all ranks have the same.

use hsdp_sharding::Param;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Standard deviation of initial weights, as in GPT-2.
const WEIGHT_STD: f32 = 0.02;

/// Returns the initial values of a parameter, row-major, for
/// [`ShardedModel::new`](hsdp::ShardedModel::new).
///
/// Matrices are normal with deviation 0.02, norms begin as the identity, biases at 0.
#[must_use]
pub fn init(param: &Param, seed: u64) -> Vec<f32> {
    match param.shape.len() {
        1 if param.name.ends_with(".weight") => vec![1.0; param.numel()],
        1 => vec![0.0; param.numel()],
        _ => normal(param, seed),
    }
}

fn normal(param: &Param, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(xxh3_64_with_seed(param.name.as_bytes(), seed));
    (0..param.numel()).map(|_| WEIGHT_STD * standard_normal(&mut rng)).collect()
}

/// Draws a number by the Box-Muller transform. One half of its pair is enough here.
fn standard_normal(rng: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}
