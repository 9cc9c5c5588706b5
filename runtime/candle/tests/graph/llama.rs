//! A small Llama as its authors write it in candle: constructors take a `VarBuilder`, and no line
//! knows of hsdp.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::rotary_emb::rope_slow;
use candle_nn::{Embedding, Init, Linear, Module, VarBuilder, embedding, linear_no_bias};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) layers: usize,
}

pub(crate) struct RmsNorm {
    weight: Tensor,
}

impl RmsNorm {
    pub(crate) fn load(size: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { weight: vb.get_with_hints(size, "weight", Init::Const(1.0))? })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let wide = x.to_dtype(DType::F32)?;
        let variance = wide.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = wide.broadcast_div(&(variance + 1e-6)?.sqrt()?)?;
        normed.to_dtype(x.dtype())?.broadcast_mul(&self.weight)
    }
}

struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    heads: usize,
}

impl Attention {
    fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let size = config.hidden;
        Ok(Self {
            q_proj: linear_no_bias(size, size, vb.pp("q_proj"))?,
            k_proj: linear_no_bias(size, size, vb.pp("k_proj"))?,
            v_proj: linear_no_bias(size, size, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(size, size, vb.pp("o_proj"))?,
            heads: config.heads,
        })
    }

    fn split(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length, _) = x.dims3()?;
        x.reshape((batch, length, self.heads, ()))?.transpose(1, 2)?.contiguous()
    }
}

impl Module for Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (_, length, size) = x.dims3()?;
        let width = size / self.heads;
        let (cos, sin) = rotations(length, width, x)?;
        let q = rope_slow(&self.split(&self.q_proj.forward(x)?)?, &cos, &sin)?;
        let k = rope_slow(&self.split(&self.k_proj.forward(x)?)?, &cos, &sin)?;
        let v = self.split(&self.v_proj.forward(x)?)?;
        let scores = (q.matmul(&k.t()?)? / (width as f64).sqrt())?;
        let scores = scores.broadcast_add(&causal_mask(length, x)?)?;
        let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        self.o_proj.forward(&mixed.transpose(1, 2)?.contiguous()?.flatten_from(2)?)
    }
}

fn rotations(length: usize, width: usize, like: &Tensor) -> Result<(Tensor, Tensor)> {
    let half = width / 2;
    let angle =
        |at: usize| (at / half) as f32 / 10_000_f32.powf((2 * (at % half)) as f32 / width as f32);
    let angles: Vec<f32> = (0..length * half).map(angle).collect();
    let angles = Tensor::from_vec(angles, (length, half), &Device::Cpu)?;
    Ok((angles.cos()?.to_dtype(like.dtype())?, angles.sin()?.to_dtype(like.dtype())?))
}

fn causal_mask(length: usize, like: &Tensor) -> Result<Tensor> {
    let masked = |at: usize| if at % length > at / length { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..length * length).map(masked).collect();
    Tensor::from_vec(mask, (length, length), &Device::Cpu)?.to_dtype(like.dtype())
}

struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let size = config.hidden;
        let inner = config.intermediate;
        Ok(Self {
            gate_proj: linear_no_bias(size, inner, vb.pp("gate_proj"))?,
            up_proj: linear_no_bias(size, inner, vb.pp("up_proj"))?,
            down_proj: linear_no_bias(inner, size, vb.pp("down_proj"))?,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gated = (self.gate_proj.forward(x)?.silu()? * self.up_proj.forward(x)?)?;
        self.down_proj.forward(&gated)
    }
}

pub(crate) struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    pub(crate) fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let norm = |name| RmsNorm::load(config.hidden, vb.pp(name));
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::load(vb.pp("self_attn"), config)?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(vb.pp("mlp"), config)?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.self_attn.forward(&self.input_layernorm.forward(x)?)?)?;
        &x + self.mlp.forward(&self.post_attention_layernorm.forward(&x)?)?
    }
}

pub(crate) fn embed_tokens(vb: &VarBuilder<'_>, config: &Config) -> Result<Embedding> {
    embedding(config.vocab, config.hidden, vb.pp("model.embed_tokens"))
}

/// The layers behind the blocks.
pub(crate) struct Head {
    norm: RmsNorm,
    lm_head: Linear,
}

impl Head {
    pub(crate) fn load(vb: &VarBuilder<'_>, config: &Config) -> Result<Self> {
        Ok(Self {
            norm: RmsNorm::load(config.hidden, vb.pp("model.norm"))?,
            lm_head: linear_no_bias(config.hidden, config.vocab, vb.pp("lm_head"))?,
        })
    }
}

impl Module for Head {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.norm.forward(x)?)
    }
}

pub(crate) struct Llama {
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    head: Head,
}

impl Llama {
    pub(crate) fn load(vb: &VarBuilder<'_>, config: &Config) -> Result<Self> {
        let block = |layer| Block::load(vb.pp(format!("model.layers.{layer}")), config);
        Ok(Self {
            embed_tokens: embed_tokens(vb, config)?,
            blocks: (0..config.layers).map(block).collect::<Result<_>>()?,
            head: Head::load(vb, config)?,
        })
    }
}

impl Module for Llama {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.embed_tokens.forward(tokens)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&x)
    }
}

/// The mean cross-entropy of the next token.
pub(crate) fn loss(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = logits.flatten_to(1)?.to_dtype(DType::F32)?;
    candle_nn::loss::cross_entropy(&logits, &targets.flatten_all()?)
}
