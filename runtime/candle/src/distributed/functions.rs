//! Common functions of one value.

use candle_core::shape::{Dim, Dims, Shape};
use candle_core::{DType, Result as CandleResult, Tensor, bail};
use candle_nn::ops;
use hsdp::dist::{self, Free, State};

use super::Candle;
use crate::error::Error;

/// candle's functions of one tensor, each for the states in which it is correct. Not collective.
///
/// Linear functions accept every state: their results for the terms of a sum add up to their result
/// for the sum. The others do not accept Partial values. For a value in 16 bits, sums, means,
/// factors and constants are computed in f32, and the result is rounded once. For other functions
/// see [`map`](dist::Dist::map) and [`map_linear`](dist::Dist::map_linear).
///
/// ```compile_fail,E0277
/// # use hsdp::dist::{Partial, Replicate};
/// # use hsdp_candle::distributed::{Dist, Functions};
/// fn wrong(sum: &Dist<Replicate, Partial>) {
///     let _ = sum.sqr(); // no: the square of a sum is not the sum of the squares
/// }
/// ```
///
/// Each function fails with candle's error if candle fails.
#[expect(clippy::missing_errors_doc, reason = "one sentence above says it of all")]
pub trait Functions<R: State, S: State>: Sized {
    /// Returns `-x`. Linear.
    fn neg(&self) -> Result<Self, Error>;

    /// Returns `factor * x`. Linear.
    fn scale(&self, factor: f64) -> Result<Self, Error>;

    /// Sums over `dims`, which are removed. Linear.
    fn sum(&self, dims: impl Dims) -> Result<Self, Error>;

    /// Sums over `dims`, which are kept with size 1. Linear.
    fn sum_keepdim(&self, dims: impl Dims) -> Result<Self, Error>;

    /// Sums this rank's elements. Linear.
    fn sum_all(&self) -> Result<Self, Error>;

    /// Returns the mean over `dims`, which are removed. Linear.
    fn mean(&self, dims: impl Dims) -> Result<Self, Error>;

    /// Returns the mean over `dims`, which are kept with size 1. Linear.
    fn mean_keepdim(&self, dims: impl Dims) -> Result<Self, Error>;

    /// Returns the mean of this rank's elements. Linear.
    fn mean_all(&self) -> Result<Self, Error>;

    /// Returns the elements in another shape. Linear.
    fn reshape(&self, shape: impl Into<Shape>) -> Result<Self, Error>;

    /// Exchanges two dims. Linear.
    fn transpose(&self, one: impl Dim, other: impl Dim) -> Result<Self, Error>;

    /// Returns `len` indices of `dim`, from `start` on. Linear.
    fn narrow(&self, dim: impl Dim, start: usize, len: usize) -> Result<Self, Error>;

    /// Repeats the value along dims of size 1 to `shape`. Linear.
    fn broadcast_as(&self, shape: impl Into<Shape>) -> Result<Self, Error>;

    /// Converts the value to another float dtype. Linear except for the rounding. For integers use
    /// [`map`](dist::Dist::map).
    fn to_dtype(&self, dtype: DType) -> Result<Self, Error>;

    /// Returns the value without a gradient. Linear.
    fn detach(&self) -> Result<Self, Error>;

    /// Returns `x + constant`.
    fn add_constant(&self, constant: f64) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Returns `x * x`.
    fn sqr(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Returns the square root.
    fn sqrt(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Returns `1 / x`.
    fn recip(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Returns `e` to the power of `x`.
    fn exp(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Returns the natural logarithm.
    fn log(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Returns the hyperbolic tangent.
    fn tanh(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Returns `x` if it is above 0, else 0.
    fn relu(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Computes the Gaussian error linear unit, approximated with tanh.
    fn gelu(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Computes the softmax along `dim`: numbers above 0 whose sum is 1.
    fn softmax(&self, dim: impl Dim) -> Result<Self, Error>
    where
        R: Free,
        S: Free;

    /// Computes the logarithm of [`softmax`](Self::softmax).
    fn log_softmax(&self, dim: impl Dim) -> Result<Self, Error>
    where
        R: Free,
        S: Free;
}

impl<R: State, S: State> Functions<R, S> for dist::Dist<Candle, R, S> {
    fn neg(&self) -> Result<Self, Error> {
        linear(self, |x| x.neg())
    }

    fn scale(&self, factor: f64) -> Result<Self, Error> {
        linear(self, |x| in_f32(x, |x| x.affine(factor, 0.0)))
    }

    fn sum(&self, dims: impl Dims) -> Result<Self, Error> {
        linear(self, |x| in_f32(x, |x| x.sum(dims)))
    }

    fn sum_keepdim(&self, dims: impl Dims) -> Result<Self, Error> {
        linear(self, |x| in_f32(x, |x| x.sum_keepdim(dims)))
    }

    fn sum_all(&self) -> Result<Self, Error> {
        linear(self, |x| in_f32(x, |x| x.sum_all()))
    }

    fn mean(&self, dims: impl Dims) -> Result<Self, Error> {
        linear(self, |x| in_f32(x, |x| x.mean(dims)))
    }

    fn mean_keepdim(&self, dims: impl Dims) -> Result<Self, Error> {
        linear(self, |x| in_f32(x, |x| x.mean_keepdim(dims)))
    }

    fn mean_all(&self) -> Result<Self, Error> {
        linear(self, |x| in_f32(x, |x| x.mean_all()))
    }

    fn reshape(&self, shape: impl Into<Shape>) -> Result<Self, Error> {
        linear(self, |x| x.reshape(shape.into()))
    }

    fn transpose(&self, one: impl Dim, other: impl Dim) -> Result<Self, Error> {
        linear(self, |x| x.transpose(one, other))
    }

    fn narrow(&self, dim: impl Dim, start: usize, len: usize) -> Result<Self, Error> {
        linear(self, |x| x.narrow(dim, start, len))
    }

    fn broadcast_as(&self, shape: impl Into<Shape>) -> Result<Self, Error> {
        linear(self, |x| x.broadcast_as(shape))
    }

    fn to_dtype(&self, dtype: DType) -> Result<Self, Error> {
        linear(self, |x| to_float(x, dtype))
    }

    fn detach(&self) -> Result<Self, Error> {
        linear(self, |x| Ok(x.detach()))
    }

    fn add_constant(&self, constant: f64) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| in_f32(x, |x| x.affine(1.0, constant)))
    }

    fn sqr(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| x.sqr())
    }

    fn sqrt(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| x.sqrt())
    }

    fn recip(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| x.recip())
    }

    fn exp(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| x.exp())
    }

    fn log(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| x.log())
    }

    fn tanh(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| x.tanh())
    }

    fn relu(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| x.relu())
    }

    fn gelu(&self) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| x.gelu())
    }

    fn softmax(&self, dim: impl Dim) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| ops::softmax(x, dim))
    }

    fn log_softmax(&self, dim: impl Dim) -> Result<Self, Error>
    where
        R: Free,
        S: Free,
    {
        free(self, |x| ops::log_softmax(x, dim))
    }
}

fn linear<R: State, S: State>(
    value: &dist::Dist<Candle, R, S>,
    function: impl FnOnce(&Tensor) -> CandleResult<Tensor>,
) -> Result<dist::Dist<Candle, R, S>, Error> {
    value.map_linear(|x| Ok(function(x)?))
}

fn free<R: Free, S: Free>(
    value: &dist::Dist<Candle, R, S>,
    function: impl FnOnce(&Tensor) -> CandleResult<Tensor>,
) -> Result<dist::Dist<Candle, R, S>, Error> {
    value.map(|x| Ok(function(x)?))
}

/// Applies a function in f32 to a value in 16 bits, and rounds the result once. candle would also
/// round the function's factor to 16 bits: a third, say, or one over the number of terms of a mean.
fn in_f32(
    x: &Tensor,
    function: impl FnOnce(&Tensor) -> CandleResult<Tensor>,
) -> CandleResult<Tensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => function(&x.to_dtype(DType::F32)?)?.to_dtype(x.dtype()),
        _ => function(x),
    }
}

fn to_float(x: &Tensor, dtype: DType) -> CandleResult<Tensor> {
    if dtype.is_int() {
        let to = dtype.as_str();
        bail!("to_dtype {to}: the rounding to integers is not linear, use `map` for it");
    }
    x.to_dtype(dtype)
}
