//! Conversion of hsdp's placements and dtypes to candle's.

use candle_core::{DType, Device, Result, Tensor, bail};
use hsdp::{ModelSpec, Param, Placement, Precision};

use crate::error::{DeclarationError, Error};

/// Returns the candle device of a rank. It is the GPU of the rank's part of the model if this crate
/// is built with `candle-cuda`, else the CPU. The rank's own thread calls this, so that it has a
/// stream of its own.
///
/// # Errors
/// Errors of candle, if it cannot use the GPU.
pub fn device(placement: Placement) -> Result<Device> {
    #[cfg(feature = "candle-cuda")]
    if let Placement::Cuda { ordinal, .. } = placement {
        return Device::new_cuda_with_stream(ordinal);
    }
    let _ = placement;
    Ok(Device::Cpu)
}

/// Returns the candle dtype that corresponds to an hsdp dtype.
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

/// Returns whether the dtype has 8 or 11 bits of precision.
pub(crate) fn is_in_16_bits(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Returns whether the units of a model cast their inputs. They do if a unit declares its compute
/// dtype, because the output of one unit may then have another dtype than the next unit computes
/// in.
pub(crate) fn casts_inputs(spec: &ModelSpec) -> bool {
    spec.units().iter().any(|unit| unit.compute_dtype.is_some())
}

/// Casts the inputs of a unit that computes in `dtype`. Ids and masks of integers stay as they are.
pub(crate) fn cast_inputs(inputs: &[Tensor], dtype: DType) -> Result<Vec<Tensor>> {
    let cast = |input: &Tensor| match input.dtype() {
        DType::F16 | DType::BF16 | DType::F32 | DType::F64 => input.to_dtype(dtype),
        _ => Ok(input.clone()),
    };
    inputs.iter().map(cast).collect()
}

/// Refuses to write a buffer in another shape than its own.
pub(crate) fn check_written(buffer: &Param, value: &Tensor) -> Result<()> {
    if value.dims() == buffer.shape {
        return Ok(());
    }
    Err(Error::Declaration(DeclarationError::BufferShape {
        buffer: buffer.name.clone(),
        written: value.dims().to_vec(),
        declared: buffer.shape.clone(),
    })
    .into())
}

/// Casts the output of a model to the output dtype of `precision`, if one is set.
pub(crate) fn cast_output(precision: Precision, tensor: &Tensor) -> Result<Tensor> {
    match precision.output {
        Some(dtype) => tensor.to_dtype(candle_dtype(dtype)?),
        None => Ok(tensor.clone()),
    }
}
