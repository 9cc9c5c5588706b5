//! Elements of tensors on the CPU, f32, bf16 or f16, converted to f32 for kernels.

use std::borrow::Cow;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Error, Layout, Result, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};
use hsdp_candle::Gradient;
use hsdp_kernels::{Real, Values};
use parking_lot::RwLockReadGuard;

/// An element type that the layers support.
pub(super) trait LayerElement: Real + WithDType {}

impl LayerElement for f32 {}
impl LayerElement for bf16 {}
impl LayerElement for f16 {}

/// Evaluates an expression with the element type of a dtype. For other dtypes it returns an error
/// of the op. A freed parameter, whose storage has a special dtype, is one of these.
macro_rules! with_element {
    ($dtype:expr, $op:expr, $T:ident => $result:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $result
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $result
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $result
            }
            other => Err(candle_core::Error::UnsupportedDTypeForOp(other, $op)),
        }
    };
}
pub(super) use with_element;

/// A contiguous tensor on the CPU.
#[derive(Clone, Copy)]
pub(super) struct LayerInput<'a> {
    storage: &'a CpuStorage,
    layout: &'a Layout,
    /// Whether a backward must compute its gradient.
    is_tracked: bool,
}

impl<'a> LayerInput<'a> {
    pub(super) fn dims(self) -> &'a [usize] {
        self.layout.dims()
    }

    pub(super) fn dims2(self) -> Result<(usize, usize)> {
        self.layout.shape().dims2()
    }

    pub(super) fn elem_count(self) -> usize {
        self.layout.shape().elem_count()
    }

    pub(super) fn is_tracked(self) -> bool {
        self.is_tracked
    }

    /// Computes the gradient of the input. `None` if it is not tracked.
    pub(super) fn gradient(
        self,
        elements: impl FnOnce() -> Result<Vec<f32>>,
    ) -> Result<Option<Gradient>> {
        self.is_tracked.then(|| Ok(elements()?.into())).transpose()
    }

    pub(super) fn dtype(self) -> DType {
        self.storage.dtype()
    }

    pub(super) fn elements<T: LayerElement>(self) -> Result<&'a [T]> {
        let Some((start, end)) = self.layout.contiguous_offsets() else {
            bail!("a layer was applied to a tensor that is not contiguous, {:?}", self.layout)
        };
        Ok(&self.storage.as_slice::<T>()?[start..end])
    }

    /// Returns the elements, of any dtype that the layers support.
    pub(super) fn values(self, op: &'static str) -> Result<Values<'a>> {
        with_element!(self.dtype(), op, T => Ok(T::values(self.elements::<T>()?)))
    }

    /// Returns the elements in f32.
    pub(super) fn wide(self, op: &'static str) -> Result<Cow<'a, [f32]>> {
        Ok(self.values(op)?.wide())
    }

    /// Returns all elements of the storage of an f32 tensor with any layout, and the layout.
    pub(super) fn all(self) -> Result<(&'a [f32], &'a Layout)> {
        Ok((self.storage.as_slice()?, self.layout))
    }
}

/// A tensor on the CPU. Its storage stays locked for reading.
pub(super) struct LentTensor<'a> {
    storage: RwLockReadGuard<'a, Storage>,
    layout: &'a Layout,
    is_tracked: bool,
}

impl<'a> LentTensor<'a> {
    pub(super) fn new(tensor: &'a Tensor, is_tracked: bool) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self { storage, layout, is_tracked }
    }

    /// Lends a tensor that gets no gradient.
    pub(super) fn of(tensor: &'a Tensor) -> Self {
        Self::new(tensor, false)
    }

    pub(super) fn input(&self) -> Result<LayerInput<'_>> {
        match &*self.storage {
            Storage::Cpu(storage) => {
                Ok(LayerInput { storage, layout: self.layout, is_tracked: self.is_tracked })
            }
            _ => bail!("the backward of a layer on the CPU was applied to another device"),
        }
    }
}

/// Refuses dtypes that the layers do not support.
pub(super) fn check_dtypes(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    let is_known = |dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    match tensors.iter().map(|tensor| tensor.dtype()).find(|dtype| !is_known(*dtype)) {
        Some(dtype) => Err(Error::UnsupportedDTypeForOp(dtype, op)),
        None => Ok(()),
    }
}

/// Converts a number to the f32 of kernels.
#[expect(clippy::cast_possible_truncation, reason = "kernels compute in f32")]
pub(super) fn narrow(number: f64) -> f32 {
    number as f32
}

/// Returns the length of the last dim.
pub(super) fn last_dim(op: &'static str, x: &Tensor) -> Result<usize> {
    match x.dims().last() {
        Some(last) => Ok(*last),
        None => bail!("{op}: a scalar has no last dim"),
    }
}

/// Refuses a weight whose length differs from the last dim of `x`.
pub(super) fn check_weight(
    op: &'static str,
    x: &Tensor,
    name: &str,
    weight: &Tensor,
) -> Result<()> {
    if weight.dims() != [last_dim(op, x)?] {
        let x = x.dims();
        let weight = weight.dims();
        bail!(
            "{op}: the {name} has the shape {weight:?}, and the last dim of x, {x:?}, needs one dim of its length"
        )
    }
    Ok(())
}
