//! The gated MLP after attention.

use candle_core::{D, Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::config::{Activation, DecoderConfig, Packing};
use super::linear::Linear;
use crate::nn;

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
        let (size, inner) = (config.hidden_size, config.intermediate_size);
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
