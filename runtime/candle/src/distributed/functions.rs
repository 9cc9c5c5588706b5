//! Functions of values whose states are types: candle's functions of one and of two tensors.

use candle_core::shape::{Dim, Dims, Shape};
use candle_core::{DType, Result as CandleResult, Tensor, bail};
use candle_nn::ops;
use hsdp::dist::{Adds, Dist, DistState, Free, Joins, Multiplies};

use super::Candle;
use crate::error::Error;

/// Declares functions of one value, each by its name and further arguments, and candle's function.
macro_rules! functions {
    ($(#[$about:meta])+ trait $functions:ident;
     linear {$($(#[$doc:meta])+ $name:ident($($arg:ident: $kind:ty),*), $function:expr;)+}
     free {$(
        $(#[$free_doc:meta])+
        $free_name:ident($($free_arg:ident: $free_kind:ty),*), $free_function:expr;
     )+}) => {
        $(#[$about])+
        pub trait $functions<R: DistState, S: DistState>: Sized {
            $($(#[$doc])+
            fn $name(&self, $($arg: $kind),*) -> Result<Self, Error>;)+

            $($(#[$free_doc])+
            fn $free_name(&self, $($free_arg: $free_kind),*) -> Result<Self, Error>
            where
                R: Free,
                S: Free;)+
        }

        impl<R: DistState, S: DistState> $functions<R, S> for Dist<Candle, R, S> {
            $(fn $name(&self, $($arg: $kind),*) -> Result<Self, Error> {
                self.map_linear(of_one($function))
            })+

            $(fn $free_name(&self, $($free_arg: $free_kind),*) -> Result<Self, Error>
            where
                R: Free,
                S: Free,
            {
                self.map(of_one($free_function))
            })+
        }
    };
}

functions! {
    /// candle's functions of one tensor, each for the states in which it is correct. Not
    /// collective.
    ///
    /// Linear functions accept every state: their results for the terms of a sum add up to their
    /// result for the sum. The others do not accept Partial values. For a value in 16 bits, sums,
    /// means, factors and constants are computed in f32, and the result is rounded once. For other
    /// functions see [`map`](Dist::map) and [`map_linear`](Dist::map_linear).
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
    trait Functions;

    linear {
        /// Returns `-x`. Linear.
        neg(), |x| x.neg();

        /// Returns `factor * x`. Linear.
        scale(factor: f64), |x| in_f32(x, |x| x.affine(factor, 0.0));

        /// Sums over `dims`, which are removed. Linear.
        sum(dims: impl Dims), |x| in_f32(x, |x| x.sum(dims));

        /// Sums over `dims`, which are kept with size 1. Linear.
        sum_keepdim(dims: impl Dims), |x| in_f32(x, |x| x.sum_keepdim(dims));

        /// Sums this rank's elements. Linear.
        sum_all(), |x| in_f32(x, |x| x.sum_all());

        /// Returns the mean over `dims`, which are removed. Linear.
        mean(dims: impl Dims), |x| in_f32(x, |x| x.mean(dims));

        /// Returns the mean over `dims`, which are kept with size 1. Linear.
        mean_keepdim(dims: impl Dims), |x| in_f32(x, |x| x.mean_keepdim(dims));

        /// Returns the mean of this rank's elements. Linear.
        mean_all(), |x| in_f32(x, |x| x.mean_all());

        /// Returns the elements in another shape. Linear.
        reshape(shape: impl Into<Shape>), |x| x.reshape(shape.into());

        /// Exchanges two dims. Linear.
        transpose(one: impl Dim, other: impl Dim), |x| x.transpose(one, other);

        /// Returns `len` indices of `dim`, from `start` on. Linear.
        narrow(dim: impl Dim, start: usize, len: usize), |x| x.narrow(dim, start, len);

        /// Repeats the value along dims of size 1 to `shape`. Linear.
        broadcast_as(shape: impl Into<Shape>), |x| x.broadcast_as(shape);

        /// Converts the value to another float dtype. Linear except for the rounding. For integers
        /// use [`map`](Dist::map).
        to_dtype(dtype: DType), |x| to_float(x, dtype);

        /// Returns the value without a gradient. Linear.
        detach(), |x| Ok(x.detach());
    }
    free {
        /// Returns `x + constant`.
        add_constant(constant: f64), |x| in_f32(x, |x| x.affine(1.0, constant));

        /// Returns `x * x`.
        sqr(), |x| x.sqr();

        /// Returns the square root.
        sqrt(), |x| x.sqrt();

        /// Returns `1 / x`.
        recip(), |x| x.recip();

        /// Returns `e` to the power of `x`.
        exp(), |x| x.exp();

        /// Returns the natural logarithm.
        log(), |x| x.log();

        /// Returns the hyperbolic tangent.
        tanh(), |x| x.tanh();

        /// Returns `x` if it is above 0, else 0.
        relu(), |x| x.relu();

        /// Computes the Gaussian error linear unit, approximated with tanh.
        gelu(), |x| x.gelu();

        /// Computes the softmax along `dim`: numbers above 0 whose sum is 1.
        softmax(dim: impl Dim), |x| ops::softmax(x, dim);

        /// Computes the logarithm of [`softmax`](Self::softmax).
        log_softmax(dim: impl Dim), |x| ops::log_softmax(x, dim);
    }
}

/// Declares a function of two values on each line: its name and further arguments, the rule that
/// its states follow, the method of `Dist` that applies the rule, and candle's function.
macro_rules! pairs {
    ($(#[$about:meta])+ trait $pairs:ident; $(
        $(#[$doc:meta])+
        $name:ident($($argument:ident: $kind:ty)?)
        by $rule:ident: $zip:ident, $function:expr;
    )+) => {
        $(#[$about])+
        pub trait $pairs<R: DistState, S: DistState>: Sized {$(
            $(#[$doc])+
            fn $name<R2, S2>(
                &self,
                other: &Dist<Candle, R2, S2>,
                $($argument: $kind,)?
            ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
            where
                R2: $rule<R>,
                S2: $rule<S>;
        )+}

        impl<R: DistState, S: DistState> $pairs<R, S> for Dist<Candle, R, S> {$(
            fn $name<R2, S2>(
                &self,
                other: &Dist<Candle, R2, S2>,
                $($argument: $kind,)?
            ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
            where
                R2: $rule<R>,
                S2: $rule<S>,
            {
                self.$zip(other, of_two($function))
            }
        )+}
    };
}

pairs! {
    /// candle's functions of two tensors, each for the pairs of states in which it is correct: sums
    /// by [`Adds`], products by [`Multiplies`], others by [`Joins`]. Not collective. For other
    /// functions see [`zip`](Dist::zip), [`zip_sum`](Dist::zip_sum) and
    /// [`zip_product`](Dist::zip_product).
    ///
    /// ```compile_fail,E0277
    /// # use hsdp::dist::{Invariant, Replicate, Varying};
    /// # use hsdp_candle::distributed::{Dist, Pairs};
    /// fn wrong(x: &Dist<Replicate, Varying>, w: &Dist<Replicate, Invariant>) {
    ///     let _ = x.matmul(w); // no: w is not shared yet, and its gradient would be one rank's
    /// }
    /// ```
    ///
    /// Each function fails with candle's error if candle fails, and with
    /// [`hsdp::Error::Collective`] if the values belong to two tapes.
    #[expect(clippy::missing_errors_doc, reason = "one sentence above says it of all")]
    trait Pairs;

    /// Returns `x + y`.
    add() by Adds: zip_sum, |x, y| x.add(y);

    /// Returns `x - y`.
    sub() by Adds: zip_sum, |x, y| x.sub(y);

    /// Returns `x + y`, repeated along dims of size 1.
    broadcast_add() by Adds: zip_sum, |x, y| x.broadcast_add(y);

    /// Returns `x - y`, repeated along dims of size 1.
    broadcast_sub() by Adds: zip_sum, |x, y| x.broadcast_sub(y);

    /// Joins the elements of both along `dim`.
    cat(dim: impl Dim) by Adds: zip_sum, |x, y| Tensor::cat(&[x, y], dim);

    /// Returns `x * y`, element by element.
    mul() by Multiplies: zip_product, |x, y| x.mul(y);

    /// Returns `x * y`, repeated along dims of size 1.
    broadcast_mul() by Multiplies: zip_product, |x, y| x.broadcast_mul(y);

    /// Multiplies two matrices, or two batches of them.
    matmul() by Multiplies: zip_product, |x, y| x.matmul(y);

    /// Multiplies batches of matrices, repeated along dims of size 1.
    broadcast_matmul() by Multiplies: zip_product, |x, y| x.broadcast_matmul(y);

    /// Returns `x / y`, element by element.
    div() by Joins: zip, |x, y| x.div(y);

    /// Returns `x / y`, repeated along dims of size 1.
    broadcast_div() by Joins: zip, |x, y| x.broadcast_div(y);

    /// Returns the indices of `dim` that `other` lists. `other` is u32, u8 or i64, of shape
    /// `[indices]`.
    index_select(dim: impl Dim) by Joins: zip, |x, y| x.index_select(y, dim);

    /// Returns, for each element of `other`, the element of `x` at that index of `dim` and at the
    /// element's own indices of the other dims.
    gather_along(dim: impl Dim) by Joins: zip, |x, y| x.gather(y, dim);
}

fn of_one(
    function: impl FnOnce(&Tensor) -> CandleResult<Tensor>,
) -> impl FnOnce(&Tensor) -> Result<Tensor, Error> {
    |x| Ok(function(x)?)
}

fn of_two(
    function: impl FnOnce(&Tensor, &Tensor) -> CandleResult<Tensor>,
) -> impl FnOnce(&Tensor, &Tensor) -> Result<Tensor, Error> {
    |x, y| Ok(function(x, y)?)
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
