//! Conversion of hsdp's dtypes to candle's.

use candle_core::{DType, Result, Tensor, bail};
use hsdp::Precision;

/// The candle dtype that corresponds to an hsdp dtype.
///
/// # Errors
/// If `dtype` is u64, which candle does not have.
pub fn candle_dtype(dtype: hsdp::DType) -> Result<DType> {
    Ok(match dtype {
        hsdp::DType::F32 => DType::F32,
        hsdp::DType::F16 => DType::F16,
        hsdp::DType::BF16 => DType::BF16,
        hsdp::DType::F64 => DType::F64,
        hsdp::DType::I32 => DType::I32,
        hsdp::DType::I64 => DType::I64,
        hsdp::DType::U32 => DType::U32,
        other => bail!("candle has no dtype {other}"),
    })
}

/// The output of a model, cast to the output dtype of `precision` if one is set.
pub(crate) fn cast_output(precision: Precision, tensor: &Tensor) -> Result<Tensor> {
    match precision.output {
        Some(dtype) => tensor.to_dtype(candle_dtype(dtype)?),
        None => Ok(tensor.clone()),
    }
}
