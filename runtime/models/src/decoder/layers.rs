//! The layers of a block that have parameters or tables: linear layers with their adapters of low
//! rank, norms, and rotary position embeddings.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::init::{FanInOut, NonLinearity, NormalOrUniform};
use candle_nn::{Init, Module, VarBuilder};

use super::config::rope::Rope;
use super::config::{DecoderConfig, NormScale};
use crate::nn;

/// Names of the two matrices of an adapter in PEFT.
const ADAPTER: [&str; 2] = ["lora_A", "lora_B"];

/// Adapters of low rank (LoRA): a projection `W x` becomes `W x + alpha / rank * B A x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// Number of rows of *A* and of columns of *B*.
    pub rank: usize,
    /// Numerator of the adapter's scale, `alpha / rank`.
    pub alpha: f64,
}

impl Lora {
    /// Returns adapters of this rank, with an alpha of 8.
    #[must_use]
    pub fn of_rank(rank: usize) -> Self {
        Self { rank, alpha: 8.0 }
    }
}

/// Returns whether a parameter belongs to an adapter.
pub(super) fn is_adapter(parameter: &str) -> bool {
    ADAPTER.iter().any(|matrix| parameter.ends_with(&format!(".{matrix}.weight")))
}

/// A linear layer with an optional bias and an optional adapter.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

#[derive(Clone, Debug)]
struct Adapter {
    a: Tensor,
    b: Tensor,
    scale: f64,
}

impl Linear {
    /// Creates a layer with a weight `[outputs, inputs]`.
    #[must_use]
    pub fn new(weight: Tensor) -> Self {
        Self { weight, bias: None, adapter: None }
    }

    /// Reads `weight` of a layer with these inputs and outputs.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(
        vb: VarBuilder<'_>,
        inputs: usize,
        outputs: usize,
        config: &DecoderConfig,
    ) -> Result<Self> {
        Ok(Self::new(vb.get_with_hints((outputs, inputs), "weight", config.init())?))
    }

    /// Reads a layer as [`load`](Self::load) does, and the adapter if the model has adapters.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load_adapted(
        vb: VarBuilder<'_>,
        inputs: usize,
        outputs: usize,
        config: &DecoderConfig,
    ) -> Result<Self> {
        let adapter = |lora| Adapter::load(&vb, inputs, outputs, lora);
        let adapter = config.lora.map(adapter).transpose()?;
        Ok(Self { adapter, ..Self::load(vb, inputs, outputs, config)? })
    }

    /// Reads `bias`, which starts at 0.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn with_bias(self, vb: &VarBuilder<'_>) -> Result<Self> {
        let outputs = self.weight.dim(0)?;
        let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
        Ok(Self { bias: Some(bias), ..self })
    }
}

impl Adapter {
    fn load(vb: &VarBuilder<'_>, inputs: usize, outputs: usize, lora: Lora) -> Result<Self> {
        let Lora { rank, alpha } = lora;
        let [a, b] = ADAPTER.map(|matrix| vb.pp(matrix));
        // B starts at 0, so the model starts without an effect of the adapters. A starts as in
        // PEFT, uniform between plus and minus the root of 1 / inputs.
        let a = a.get_with_hints((rank, inputs), "weight", uniform())?;
        let b = b.get_with_hints((outputs, rank), "weight", Init::Const(0.0))?;
        #[expect(clippy::cast_precision_loss, reason = "a rank is small")]
        let scale = alpha / rank as f64;
        Ok(Self { a, b, scale })
    }
}

/// Returns Kaiming's uniform distribution with the gain of a leaky ReLU of slope 5^(1/2).
fn uniform() -> Init {
    Init::Kaiming {
        dist: NormalOrUniform::Uniform,
        fan: FanInOut::FanIn,
        non_linearity: NonLinearity::ExplicitGain((1.0_f64 / 3.0).sqrt()),
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = nn::linear(x, &self.weight, self.bias.as_ref())?;
        match &self.adapter {
            None => Ok(y),
            // The scale is applied where the tensor is narrow.
            Some(Adapter { a, b, scale }) => {
                let narrow = nn::linear(x, a, None)?;
                // In 16 bits candle would round the scale too.
                let scaled = (narrow.to_dtype(DType::F32)? * *scale)?.to_dtype(narrow.dtype())?;
                nn::add(&y, &nn::linear(&scaled, b, None)?)
            }
        }
    }
}

/// Norm by the root mean square of a row.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    scale: NormScale,
    eps: f64,
}

impl RmsNorm {
    /// Reads `weight` of a norm of rows of `size` elements.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: VarBuilder<'_>, size: usize, config: &DecoderConfig) -> Result<Self> {
        let scale = config.norm_scale;
        let eps = config.rms_norm_eps;
        Ok(Self { weight: vb.get_with_hints(size, "weight", scale.init())?, scale, eps })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.scale {
            NormScale::Weight => nn::rms_norm(x, &self.weight, self.eps),
            // In 16 bits the sum would be rounded.
            NormScale::OnePlusWeight => {
                nn::rms_norm(x, &(self.weight.to_dtype(DType::F32)? + 1.0)?, self.eps)
            }
        }
    }
}

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

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// 16 bits cannot represent 8 / 3, and candle would multiply by the rounded number.
    #[test]
    fn the_scale_of_an_adapter_is_not_rounded() -> Result<()> {
        for dtype in [DType::BF16, DType::F16] {
            let of = |value: f64| Tensor::new(&[[value]], &Device::Cpu)?.to_dtype(dtype);
            let adapter = Adapter { a: of(1.0)?, b: of(1.0)?, scale: 8.0 / 3.0 };
            let linear = Linear { adapter: Some(adapter), ..Linear::new(of(0.0)?) };
            for number in 1..200 {
                let number = f64::from(number);
                let [got, want] = [linear.forward(&of(number)?)?, of(number * 8.0 / 3.0)?]
                    .map(|it| it.to_dtype(DType::F64).and_then(|it| it.to_vec2::<f64>()));
                assert_eq!(got?, want?, "{number} in {dtype:?}");
            }
        }
        Ok(())
    }
}
