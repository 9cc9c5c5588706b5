//! Text from a trained GPT.

use candle_core::{Device, IndexOp, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Gpt;
use hsdp_candle::Units;

/// Returns `prompt` (which must not be empty) followed by `draw.count` drawn tokens.
///
/// # Errors
/// The errors of [`Gpt::logits`].
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
    /// Number of tokens to draw.
    pub count: usize,
    /// Divisor of the logits. Below 1 it makes likely tokens likelier, above 1 unlikely ones. At 0
    /// each token is the likeliest.
    pub temperature: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Returns the token at which the cumulative probability passes `point`, which is in `0..1`.
/// Returns the likeliest if the probability never passes it, because sums were rounded or the
/// temperature is 0.
fn pick(logits: &[f32], temperature: f32, point: f32) -> u32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights = logits.iter().map(|logit| ((logit - largest) / temperature).exp());
    let total: f32 = weights.clone().sum();
    let mut left = point * total;
    let passed = weights.zip(0..).find(|(weight, _)| {
        left -= weight;
        left < 0.0
    });
    let likeliest = || logits.iter().zip(0..).find(|(logit, _)| **logit == largest);
    let token = passed.map(|(_, token)| token).or_else(|| likeliest().map(|(_, token)| token));
    token.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::pick;

    #[test]
    fn a_point_picks_the_token_in_whose_part_it_lies() {
        let logits = [0.5_f32.ln(), 0.25_f32.ln(), 0.25_f32.ln()];
        assert_eq!([0.1, 0.49, 0.6, 0.9].map(|point| pick(&logits, 1.0, point)), [0, 0, 1, 2]);
    }

    #[test]
    fn without_temperature_the_likeliest_token_is_picked() {
        assert_eq!([0.0, 0.99].map(|point| pick(&[0.0, 3.0, 1.0], 0.0, point)), [1, 1]);
    }
}
