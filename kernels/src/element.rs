//! The element types of buffers.

use std::fmt::Debug;

use bytemuck::Pod;
use half::{bf16, f16};
use hsdp_sharding::DType;

use crate::number::Arithmetic;
use crate::values::{Values, ValuesMut};

/// An element type that collectives move and reduce: `f32`, `f16`, `bf16`, `f64`, `i32`, `i64`,
/// `u32` or `u64`.
///
/// The trait is sealed, so the set of types is closed, as [`DType`] is. Only this crate can call
/// the methods that sum elements:
///
/// ```compile_fail
/// # use hsdp_kernels::Element;
/// fn widened<'a, T: Element>(values: &'a [T], scratch: &'a mut [T::Accumulator]) -> &'a [T::Accumulator] {
///     T::widen(values, scratch) // no: it takes an argument that only the crate can make
/// }
/// ```
pub trait Element: Arithmetic + Pod + Debug + PartialEq + PartialOrd + Send + Sync {
    /// The dtype of this type.
    const DTYPE: DType;
}

/// An element type of parameters and gradients: `f32`, `f16` or `bf16`.
pub trait Real: Element {
    /// Wraps `values` in the variant of [`Values`] for this type.
    fn values(values: &[Self]) -> Values<'_>;

    /// Wraps `values` in the variant of [`ValuesMut`] for this type.
    fn values_mut(values: &mut [Self]) -> ValuesMut<'_>;
}

impl<'a, T: Real> From<&'a [T]> for Values<'a> {
    fn from(values: &'a [T]) -> Self {
        T::values(values)
    }
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
}

impl Element for i32 {
    const DTYPE: DType = DType::I32;
}

impl Element for i64 {
    const DTYPE: DType = DType::I64;
}

impl Element for u32 {
    const DTYPE: DType = DType::U32;
}

impl Element for u64 {
    const DTYPE: DType = DType::U64;
}

impl Real for f32 {
    fn values(values: &[Self]) -> Values<'_> {
        Values::F32(values)
    }

    fn values_mut(values: &mut [Self]) -> ValuesMut<'_> {
        ValuesMut::F32(values)
    }
}

impl Real for f16 {
    fn values(values: &[Self]) -> Values<'_> {
        Values::F16(values)
    }

    fn values_mut(values: &mut [Self]) -> ValuesMut<'_> {
        ValuesMut::F16(values)
    }
}

impl Real for bf16 {
    fn values(values: &[Self]) -> Values<'_> {
        Values::BF16(values)
    }

    fn values_mut(values: &mut [Self]) -> ValuesMut<'_> {
        ValuesMut::BF16(values)
    }
}
