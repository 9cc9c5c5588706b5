//! A block with its MLP, and the layers before and after the blocks.

use candle_core::{D, Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::attention::Attention;
use super::config::{Activation, DecoderConfig, Packing};
use super::layers::{Linear, RmsNorm, Rotary};
use crate::nn;

/// A block: attention and the MLP after it, each with norms and a residual sum.
#[derive(Clone, Debug)]
pub struct Block {
    self_attn: Attention,
    mlp: Mlp,
    /// Norms before and after attention, and before and after the MLP.
    norms: [Option<RmsNorm>; 4],
}

impl Block {
    /// Reads the parameters of block `index`.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: &VarBuilder<'_>, index: usize, config: &DecoderConfig) -> Result<Self> {
        let names = &config.block_norms;
        let norm = |name: Option<&str>| {
            name.map(|name| RmsNorm::load(vb.pp(name), config.hidden_size, config)).transpose()
        };
        Ok(Self {
            self_attn: Attention::load(&vb.pp("self_attn"), index, config)?,
            mlp: Mlp::load(&vb.pp("mlp"), config)?,
            norms: [
                norm(names.before_attention)?,
                norm(names.after_attention)?,
                norm(names.before_mlp)?,
                norm(names.after_mlp)?,
            ],
        })
    }

    /// Maps `[sequences, length, hidden_size]` to the same shape.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn forward(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        let [before_attention, after_attention, before_mlp, after_mlp] = &self.norms;
        let attended = self.self_attn.forward(&normed(before_attention, x)?, rotary)?;
        let x = nn::add(x, &normed(after_attention, &attended)?)?;
        let mapped = self.mlp.forward(&normed(before_mlp, &x)?)?;
        nn::add(&x, &normed(after_mlp, &mapped)?)
    }
}

fn normed(norm: &Option<RmsNorm>, x: &Tensor) -> Result<Tensor> {
    match norm {
        None => Ok(x.clone()),
        Some(norm) => norm.forward(x),
    }
}

/// Embedding of tokens.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
    /// Row that gets no gradient.
    padding: Option<usize>,
    scale: Option<f64>,
}

impl Embedding {
    /// Reads `model.embed_tokens` of the whole model's `vb`.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: &VarBuilder<'_>, config: &DecoderConfig) -> Result<Self> {
        let padding = config.pad_token_id;
        let scale = config.embedding_scale;
        Ok(Self { weight: embedding_weight(vb, config)?, padding, scale })
    }
}

impl Module for Embedding {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let vectors = match self.padding {
            None => nn::embedding(tokens, &self.weight),
            Some(padding) => nn::padded_embedding(tokens, &self.weight, padding),
        }?;
        match self.scale {
            None => Ok(vectors),
            // In 16 bits candle rounds the scale to the dtype of the weight, as transformers does.
            Some(scale) => vectors * scale,
        }
    }
}

fn embedding_weight(vb: &VarBuilder<'_>, config: &DecoderConfig) -> Result<Tensor> {
    let shape = (config.vocab_size, config.hidden_size);
    vb.pp("model.embed_tokens").get_with_hints(shape, "weight", config.init())
}

/// Layers after the blocks.
#[derive(Clone, Debug)]
pub struct LmHead {
    norm: RmsNorm,
    lm_head: Linear,
    cap: Option<f64>,
}

impl LmHead {
    /// Reads `model.norm` and `lm_head` from the whole model's `vb`. If the head is tied, reads
    /// `model.embed_tokens` in place of `lm_head`.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: &VarBuilder<'_>, config: &DecoderConfig) -> Result<Self> {
        let size = config.hidden_size;
        let lm_head = match config.tie_word_embeddings {
            true => Linear::new(embedding_weight(vb, config)?),
            false => Linear::load(vb.pp("lm_head"), size, config.vocab_size, config)?,
        };
        let norm = RmsNorm::load(vb.pp("model.norm"), size, config)?;
        Ok(Self { norm, lm_head, cap: config.logit_cap })
    }
}

impl Module for LmHead {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let logits = self.lm_head.forward(&self.norm.forward(x)?)?;
        match self.cap {
            None => Ok(logits),
            Some(cap) => nn::soft_cap(&logits, cap),
        }
    }
}

/// The gated MLP after attention.
#[derive(Clone, Debug)]
pub struct Mlp {
    gate_up: GateUp,
    activation: Activation,
    down_proj: Linear,
}

#[derive(Clone, Debug)]
enum GateUp {
    Separate([Linear; 2]),
    Packed(Linear),
}

impl Mlp {
    /// Reads the projections.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: &VarBuilder<'_>, config: &DecoderConfig) -> Result<Self> {
        let size = config.hidden_size;
        let inner = config.intermediate_size;
        let linear = |name, inputs, outputs| {
            let linear = Linear::load(vb.pp(name), inputs, outputs, config)?;
            if config.biases.mlp { linear.with_bias(&vb.pp(name)) } else { Ok(linear) }
        };
        let gate_up = match config.packing {
            Packing::Separate => GateUp::Separate([
                linear("gate_proj", size, inner)?,
                linear("up_proj", size, inner)?,
            ]),
            Packing::Packed => GateUp::Packed(linear("gate_up_proj", size, 2 * inner)?),
        };
        let down_proj = linear("down_proj", inner, size)?;
        Ok(Self { gate_up, activation: config.activation, down_proj })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = match &self.gate_up {
            GateUp::Separate([gate, up]) => [gate.forward(x)?, up.forward(x)?],
            GateUp::Packed(both) => {
                let both = both.forward(x)?;
                let inner = both.dim(D::Minus1)? / 2;
                [both.narrow(D::Minus1, 0, inner)?, both.narrow(D::Minus1, inner, inner)?]
            }
        };
        let gated = match self.activation {
            Activation::Silu => nn::silu_mul(&gate, &up)?,
            Activation::GeluTanh => nn::gelu_mul(&gate, &up)?,
        };
        self.down_proj.forward(&gated)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// bf16 cannot represent the square root of 24.
    #[test]
    fn the_scale_of_an_embedding_is_rounded_to_bf16() -> Result<()> {
        let scale = 24_f64.sqrt();
        let rounded = f64::from(half::bf16::from_f64(scale));
        let of = |values: Vec<f64>| Tensor::new(values, &Device::Cpu)?.to_dtype(DType::BF16);
        let values: Vec<_> = (1..200).map(f64::from).collect();
        let by = |scale: f64| of(values.iter().map(|value| value * scale).collect());
        let weight = of(values.clone())?.unsqueeze(1)?;
        let embedding = Embedding { weight, padding: None, scale: Some(scale) };
        let got = embedding.forward(&Tensor::arange(0_u32, 199, &Device::Cpu)?)?.squeeze(1)?;
        let [got, want, other] = [got, by(rounded)?, by(scale)?]
            .map(|it| it.to_dtype(DType::F32).and_then(|it| it.to_vec1::<f32>()));
        let got = got?;
        assert_eq!(got, want?);
        assert_ne!(got, other?);
        Ok(())
    }
}
