//! Parameters and gradients as bytes, and back.

use half::{bf16, f16};
use hsdp_kernels::{Values, ValuesMut};
use hsdp_sharding::DType;

/// Bytes as values of a dtype.
pub(crate) fn values(dtype: DType, bytes: &[u8]) -> Values<'_> {
    match dtype {
        DType::F16 => Values::F16(bytemuck::cast_slice::<_, f16>(bytes)),
        DType::BF16 => Values::BF16(bytemuck::cast_slice::<_, bf16>(bytes)),
        _ => Values::F32(bytemuck::cast_slice(bytes)),
    }
}

/// Bytes as values of a dtype, to be written.
pub(crate) fn values_mut(dtype: DType, bytes: &mut [u8]) -> ValuesMut<'_> {
    match dtype {
        DType::F16 => ValuesMut::F16(bytemuck::cast_slice_mut::<_, f16>(bytes)),
        DType::BF16 => ValuesMut::BF16(bytemuck::cast_slice_mut::<_, bf16>(bytes)),
        _ => ValuesMut::F32(bytemuck::cast_slice_mut(bytes)),
    }
}

/// Values as bytes.
pub(crate) fn bytes_of(values: Values<'_>) -> &[u8] {
    match values {
        Values::F32(values) => bytemuck::cast_slice(values),
        Values::F16(values) => bytemuck::cast_slice(values),
        Values::BF16(values) => bytemuck::cast_slice(values),
    }
}
