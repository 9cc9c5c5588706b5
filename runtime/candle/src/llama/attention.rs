//! Causal self-attention whose key-value heads are shared by groups of query heads.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::config::LlamaConfig;
use super::linear::Linear;
use super::rotary::Rotary;
use crate::nn::{self, Mask};

/// Self-attention.
#[derive(Clone, Debug)]
pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    head_dim: usize,
}

impl Attention {
    /// Reads `q_proj`, `k_proj`, `v_proj` and `o_proj`, with their adapters if there are any.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: VarBuilder<'_>, config: &LlamaConfig) -> Result<Self> {
        let (heads, kv_heads, head_dim) =
            (config.num_attention_heads, config.num_key_value_heads, config.head_dim);
        let (size, wide, narrow) = (config.hidden_size, heads * head_dim, kv_heads * head_dim);
        let linear = |name, sizes| Linear::load_adapted(vb.pp(name), sizes, config);
        Ok(Self {
            q_proj: linear("q_proj", (size, wide))?,
            k_proj: linear("k_proj", (size, narrow))?,
            v_proj: linear("v_proj", (size, narrow))?,
            o_proj: linear("o_proj", (wide, size))?,
            head_dim,
        })
    }

    /// `[sequences, length, hidden_size]` to the same.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn forward(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        let (sequences, length, _) = x.dims3()?;
        let split = |x: Tensor| x.reshape((sequences, length, (), self.head_dim));
        let q = rotary.rotate(&split(self.q_proj.forward(x)?)?)?;
        let k = rotary.rotate(&split(self.k_proj.forward(x)?)?)?;
        let v = split(self.v_proj.forward(x)?)?;
        #[expect(clippy::cast_precision_loss, reason = "a head is narrow")]
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let mixed = nn::attention([&q, &k, &v], scale, Mask::Causal)?;
        self.o_proj.forward(&mixed.flatten_from(2)?)
    }
}
