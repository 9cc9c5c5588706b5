//! Text from a trained GPT.

use candle_core::{Device, IndexOp, Result, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Gpt;
use crate::model::Units;

/// Returns `prompt` (which must not be empty) followed by `draw.count` drawn tokens.
///
/// # Errors
/// As [`Gpt::logits`].
pub fn sample(gpt: &Gpt, units: &dyn Units, prompt: &[u32], draw: Draw) -> Result<Vec<u32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(draw.seed);
    let mut tokens = prompt.to_vec();
    for _ in 0..draw.count {
        let window = &tokens[tokens.len().saturating_sub(gpt.config().context)..];
        let input = Tensor::new(window, &Device::Cpu)?.unsqueeze(0)?;
        let logits = gpt.logits(units, &input)?;
        let last =
            logits.i(window.len() - 1)?.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()?;
        tokens.push(pick(&last, draw.temperature, rng.random()));
    }
    Ok(tokens)
}

/// Options of [`sample`].
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// The number of tokens to draw.
    pub count: usize,
    /// Logits are divided by it: below 1 makes likely tokens likelier, above 1 unlikely ones.
    pub temperature: f32,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// The token at which the cumulative probability passes `point`, which is in `0..1`.
fn pick(logits: &[f32], temperature: f32, point: f32) -> u32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights = logits.iter().map(|logit| ((logit - largest) / temperature).exp());
    let total: f32 = weights.clone().sum();
    let mut left = point * total;
    let passed = weights.zip(0..).find(|(weight, _)| {
        left -= weight;
        left < 0.0
    });
    passed.map_or(0, |(_, token)| token)
}
