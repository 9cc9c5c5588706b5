//! A block, and the layers before and behind the blocks.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use super::attention::Attention;
use super::config::LlamaConfig;
use super::linear::Linear;
use super::rotary::Rotary;
use crate::nn;

/// Norm by the root of the mean square of a row.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// Reads `weight`.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: VarBuilder<'_>, config: &LlamaConfig) -> Result<Self> {
        let weight = vb.get_with_hints(config.hidden_size, "weight", Init::Const(1.0))?;
        Ok(Self { weight, eps: config.rms_norm_eps })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        nn::rms_norm(x, &self.weight, self.eps)
    }
}

/// The gated layers behind attention.
#[derive(Clone, Debug)]
pub struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    /// Reads `gate_proj`, `up_proj` and `down_proj`.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: VarBuilder<'_>, config: &LlamaConfig) -> Result<Self> {
        let (size, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            gate_proj: Linear::load(vb.pp("gate_proj"), (size, inner), config)?,
            up_proj: Linear::load(vb.pp("up_proj"), (size, inner), config)?,
            down_proj: Linear::load(vb.pp("down_proj"), (inner, size), config)?,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gated = nn::silu_mul(&self.gate_proj.forward(x)?, &self.up_proj.forward(x)?)?;
        self.down_proj.forward(&gated)
    }
}

/// A block: attention and the layers behind it, each with a norm before it and a sum behind it.
#[derive(Clone, Debug)]
pub struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    /// Reads the parameters of a block.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: VarBuilder<'_>, config: &LlamaConfig) -> Result<Self> {
        Ok(Self {
            input_layernorm: RmsNorm::load(vb.pp("input_layernorm"), config)?,
            self_attn: Attention::load(vb.pp("self_attn"), config)?,
            post_attention_layernorm: RmsNorm::load(vb.pp("post_attention_layernorm"), config)?,
            mlp: Mlp::load(vb.pp("mlp"), config)?,
        })
    }

    /// `[sequences, length, hidden_size]` to the same.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn forward(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        let x = (x + self.self_attn.forward(&self.input_layernorm.forward(x)?, rotary)?)?;
        &x + self.mlp.forward(&self.post_attention_layernorm.forward(&x)?)?
    }
}

/// The vectors of tokens.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
    /// The row that gets no gradient.
    padding: Option<usize>,
}

impl Embedding {
    /// Reads `model.embed_tokens` of the whole model's `vb`.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: &VarBuilder<'_>, config: &LlamaConfig) -> Result<Self> {
        Ok(Self { weight: embedding_weight(vb, config)?, padding: config.pad_token_id })
    }
}

impl Module for Embedding {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        match self.padding {
            None => nn::embedding(tokens, &self.weight),
            Some(padding) => nn::padded_embedding(tokens, &self.weight, padding),
        }
    }
}

fn embedding_weight(vb: &VarBuilder<'_>, config: &LlamaConfig) -> Result<Tensor> {
    let shape = (config.vocab_size, config.hidden_size);
    vb.pp("model.embed_tokens").get_with_hints(shape, "weight", config.init())
}

/// The layers behind the blocks.
#[derive(Clone, Debug)]
pub struct Head {
    norm: RmsNorm,
    lm_head: Linear,
}

impl Head {
    /// Reads `model.norm` and `lm_head`, or in its place `model.embed_tokens` if the two are tied,
    /// of the whole model's `vb`.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: &VarBuilder<'_>, config: &LlamaConfig) -> Result<Self> {
        let lm_head = match config.tie_word_embeddings {
            true => Linear::new(embedding_weight(vb, config)?),
            false => {
                Linear::load(vb.pp("lm_head"), (config.hidden_size, config.vocab_size), config)?
            }
        };
        Ok(Self { norm: RmsNorm::load(vb.pp("model.norm"), config)?, lm_head })
    }
}

impl Module for Head {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.norm.forward(x)?)
    }
}
