//! Causal self-attention whose key-value heads are shared by groups of query heads.

use candle_core::{D, Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::config::{DecoderConfig, Layer, Packing, QkNorm};
use super::layers::{Linear, RmsNorm, Rotary};
use crate::nn::{self, Mask, Scores};

/// Self-attention of a block.
#[derive(Clone, Debug)]
pub struct Attention {
    projections: Projections,
    /// Norms of queries and keys.
    norms: Option<(QkNorm, [RmsNorm; 2])>,
    o_proj: Linear,
    layer: Layer,
    heads: [usize; 3],
    head_dim: usize,
    scale: f64,
    cap: Option<f64>,
}

/// Projections to queries, keys and values.
#[derive(Clone, Debug)]
enum Projections {
    Separate([Linear; 3]),
    Packed(Linear),
}

impl Attention {
    /// Reads the projections of block `index`, with their adapters if there are any, and the norms
    /// of queries and keys.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: &VarBuilder<'_>, index: usize, config: &DecoderConfig) -> Result<Self> {
        let heads = config.num_attention_heads;
        let kv_heads = config.num_key_value_heads;
        let size = config.hidden_size;
        let head_dim = config.head_dim;
        let biases = config.biases;
        let linear = |name, inputs, outputs, has_bias| {
            let linear = Linear::load_adapted(vb.pp(name), inputs, outputs, config)?;
            if has_bias { linear.with_bias(&vb.pp(name)) } else { Ok(linear) }
        };
        let heads = [heads, kv_heads, kv_heads];
        let projection = |name, heads: usize| linear(name, size, heads * head_dim, biases.qkv);
        let projections = match config.packing {
            Packing::Separate => Projections::Separate([
                projection("q_proj", heads[0])?,
                projection("k_proj", heads[1])?,
                projection("v_proj", heads[2])?,
            ]),
            Packing::Packed => Projections::Packed(projection("qkv_proj", heads.iter().sum())?),
        };
        let norm = |kind, name, heads| {
            let heads = match kind {
                QkNorm::EachHead => 1,
                QkNorm::Whole => heads,
            };
            RmsNorm::load(vb.pp(name), heads * head_dim, config)
        };
        let norms = |kind| {
            Ok::<_, candle_core::Error>((
                kind,
                [norm(kind, "q_norm", heads[0])?, norm(kind, "k_norm", heads[1])?],
            ))
        };
        Ok(Self {
            projections,
            norms: config.qk_norm.map(norms).transpose()?,
            o_proj: linear("o_proj", heads[0] * head_dim, size, biases.output)?,
            layer: config.layers[index],
            heads,
            head_dim,
            scale: config.attention_scale,
            cap: config.attention_cap,
        })
    }

    /// Maps `[sequences, length, hidden_size]` to the same shape.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn forward(&self, x: &Tensor, rotary: &Rotary) -> Result<Tensor> {
        let [q, k, v] = self.project(x)?;
        let [q, k] = match self.layer.rope {
            true => [rotary.rotate(&q)?, rotary.rotate(&k)?],
            false => [q, k],
        };
        let mask = self.layer.window.map_or(Mask::Causal, Mask::Window);
        let scores = Scores { scale: self.scale, cap: self.cap, mask };
        let mixed = nn::attention([&q, &k, &v], &scores)?;
        self.o_proj.forward(&mixed.flatten_from(2)?)
    }

    /// Computes queries, keys and values, `[sequences, length, heads, head_dim]`, with their norms.
    fn project(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let projected = match &self.projections {
            Projections::Separate(parts) => {
                let [q, k, v] = parts.each_ref().map(|part| part.forward(x));
                [q?, k?, v?]
            }
            Projections::Packed(all) => {
                let all = all.forward(x)?;
                let [q, k, v] = self.heads.map(|heads| heads * self.head_dim);
                let part = |from, size| all.narrow(D::Minus1, from, size);
                [part(0, q)?, part(q, k)?, part(q + k, v)?]
            }
        };
        let [q, k, v] = projected;
        let split = |x: &Tensor| {
            let (sequences, length, _) = x.dims3()?;
            x.reshape((sequences, length, (), self.head_dim))
        };
        let [q, k] = match &self.norms {
            None => [split(&q)?, split(&k)?],
            Some((QkNorm::Whole, [q_norm, k_norm])) => {
                [split(&q_norm.forward(&q)?)?, split(&k_norm.forward(&k)?)?]
            }
            Some((QkNorm::EachHead, [q_norm, k_norm])) => {
                [q_norm.forward(&split(&q)?)?, k_norm.forward(&split(&k)?)?]
            }
        };
        Ok([q, k, split(&v)?])
    }
}
