//! Common functions of two values.

use candle_core::shape::Dim;
use candle_core::{Result as CandleResult, Tensor};
use hsdp::dist::{Adds, Dist, Joins, Multiplies, State};

use super::Candle;
use crate::error::Error;

/// Declares a function of two values on each line: its name and further arguments, the rule that
/// its states follow, the method of `Dist` that applies the rule, and candle's function.
macro_rules! pairs {
    ($(#[$about:meta])+ trait $pairs:ident; $($(#[$doc:meta])+ $name:ident($($argument:ident: $kind:ty)?) by $rule:ident: $zip:ident, $function:expr;)+) => {
        $(#[$about])+
        pub trait $pairs<R: State, S: State>: Sized {$(
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

        impl<R: State, S: State> $pairs<R, S> for Dist<Candle, R, S> {$(
            fn $name<R2, S2>(
                &self,
                other: &Dist<Candle, R2, S2>,
                $($argument: $kind,)?
            ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
            where
                R2: $rule<R>,
                S2: $rule<S>,
            {
                self.$zip(other, in_our_errors($function))
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
    /// Each function fails with candle's error if candle fails, and with [`hsdp::Error::State`] if
    /// the values belong to two tapes.
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

fn in_our_errors(
    function: impl FnOnce(&Tensor, &Tensor) -> CandleResult<Tensor>,
) -> impl FnOnce(&Tensor, &Tensor) -> Result<Tensor, Error> {
    |x, y| Ok(function(x, y)?)
}
