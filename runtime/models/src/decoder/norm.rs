//! Norm by the root of the mean square of a row.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::config::{DecoderConfig, NormScale};
use crate::nn;

/// Norm by the root of the mean square of a row.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// Factors of the elements of a row.
    scale: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// Reads `weight` of a norm of rows of `size` elements.
    ///
    /// # Errors
    /// The errors of `vb`.
    pub fn load(vb: VarBuilder<'_>, size: usize, config: &DecoderConfig) -> Result<Self> {
        let weight = vb.get_with_hints(size, "weight", config.norm_scale.init())?;
        let scale = match config.norm_scale {
            NormScale::Weight => weight,
            // In 16 bits the sum would be rounded.
            NormScale::OnePlusWeight => (weight.to_dtype(DType::F32)? + 1.0)?,
        };
        Ok(Self { scale, eps: config.rms_norm_eps })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        nn::rms_norm(x, &self.scale, self.eps)
    }
}
