//! Norm by the root mean square of a row.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::config::{DecoderConfig, NormScale};
use crate::nn;

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
        let (scale, eps) = (config.norm_scale, config.rms_norm_eps);
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
