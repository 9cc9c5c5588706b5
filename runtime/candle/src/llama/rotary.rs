//! Rotary position embeddings.

use candle_core::{Device, Result, Tensor, bail};

use super::config::{LlamaConfig, RopeScaling};
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
    pub fn new(config: &LlamaConfig, length: usize, device: &Device) -> Result<Self> {
        let most = config.max_position_embeddings;
        if length > most {
            bail!("a sequence has {length} tokens, more than max_position_embeddings, {most}")
        }
        let angles = angles(config, length);
        let table = |of: fn(f64) -> f64| {
            #[expect(clippy::cast_possible_truncation, reason = "the one rounding")]
            let values: Vec<f32> =
                angles.iter().map(|angle| of(f64::from(*angle)) as f32).collect();
            Tensor::from_vec(values, (length, config.head_dim / 2), device)
        };
        Ok(Self { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }

    /// Rotates `x`, `[sequences, length, heads, head_dim]`.
    ///
    /// # Errors
    /// As [`nn::rope`].
    pub fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        nn::rope(x, &self.cos, &self.sin)
    }
}

/// Angles by position and pair, in f32 throughout, as transformers computes them.
#[expect(clippy::cast_possible_truncation, reason = "theta and factors are numbers of f32")]
#[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
fn angles(config: &LlamaConfig, length: usize) -> Vec<f32> {
    let frequency = |pair: usize| {
        let exponent = (2 * pair) as f32 / config.head_dim as f32;
        let frequency = 1.0 / (config.rope_theta as f32).powf(exponent);
        match config.rope_scaling {
            RopeScaling::Default => frequency,
            RopeScaling::Linear(factor) => frequency / factor as f32,
        }
    };
    let frequencies: Vec<f32> = (0..config.head_dim / 2).map(frequency).collect();
    let of_position =
        |position| frequencies.iter().map(move |frequency| position as f32 * frequency);
    (0..length).flat_map(of_position).collect()
}
