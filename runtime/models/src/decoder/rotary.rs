//! Rotary position embeddings.

use candle_core::{Device, Result, Tensor, bail};

use super::config::DecoderConfig;
use super::config::rope::Rope;
use crate::nn;

/// The sines and cosines of a sequence's positions, in f32.
#[derive(Clone, Debug)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Computes the sines and cosines of positions `0..length`.
    ///
    /// # Errors
    /// If `length` is above `max_position_embeddings`.
    pub fn new(config: &DecoderConfig, length: usize, device: &Device) -> Result<Self> {
        let most = config.max_position_embeddings;
        if length > most {
            bail!("a sequence has {length} tokens, more than max_position_embeddings, {most}")
        }
        let angles = angles(&config.rope, length);
        let table = |of: fn(f64) -> f64| {
            #[expect(clippy::cast_possible_truncation, reason = "the one rounding")]
            let values: Vec<f32> =
                angles.iter().map(|angle| of(f64::from(*angle)) as f32).collect();
            Tensor::from_vec(values, (length, config.rope.pairs()), device)
        };
        Ok(Self { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }

    /// Rotates the first elements of each head of `x`, `[sequences, length, heads, head_dim]`.
    ///
    /// # Errors
    /// The errors of [`nn::rope`].
    pub fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        nn::rope(x, &self.cos, &self.sin)
    }
}

/// Computes angles by position and pair. Like transformers, computes in f32 throughout.
#[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
fn angles(rope: &Rope, length: usize) -> Vec<f32> {
    let frequencies: Vec<f32> = (0..rope.pairs()).map(|pair| rope.frequency(pair)).collect();
    let of_position =
        |position| frequencies.iter().map(move |frequency| position as f32 * frequency);
    (0..length).flat_map(of_position).collect()
}
