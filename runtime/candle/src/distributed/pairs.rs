//! Common functions of two values.

use candle_core::shape::Dim;
use candle_core::{Result as CandleResult, Tensor};
use hsdp::dist::{Adds, Dist, Joins, Multiplies, State};

use super::Candle;
use crate::error::Error;

/// One line for each function of two values: its name and further arguments, the rule that its states follow, the method of
/// `Dist` that applies the rule, and candle's function.
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
    /// candle's functions of two tensors, each for the pairs of states in which it is correct: sums by [`Adds`], products by
    /// [`Multiplies`], others by [`Joins`]. Not collective. For other functions see [`zip`](Dist::zip),
    /// [`zip_sum`](Dist::zip_sum) and [`zip_product`](Dist::zip_product).
    ///
    /// ```compile_fail,E0277
    /// # use hsdp::dist::{Invariant, Replicate, Varying};
    /// # use hsdp_candle::distributed::{Dist, Pairs};
    /// fn wrong(x: &Dist<Replicate, Varying>, w: &Dist<Replicate, Invariant>) {
    ///     let _ = x.matmul(w); // no: w is not shared yet, and its gradient would be one rank's
    /// }
    /// ```
    ///
    /// Each fails with candle's error if candle fails, and with [`hsdp::Error::State`] if the values are of two tapes.
    #[expect(clippy::missing_errors_doc, reason = "one sentence above says it of all")]
    trait Pairs;

    /// `x + y`.
    add() by Adds: zip_sum, |x, y| x.add(y);

    /// `x - y`.
    sub() by Adds: zip_sum, |x, y| x.sub(y);

    /// `x + y`, repeated where a dim has size 1.
    broadcast_add() by Adds: zip_sum, |x, y| x.broadcast_add(y);

    /// `x - y`, repeated where a dim has size 1.
    broadcast_sub() by Adds: zip_sum, |x, y| x.broadcast_sub(y);

    /// The elements of both, one after the other along `dim`.
    cat(dim: impl Dim) by Adds: zip_sum, |x, y| Tensor::cat(&[x, y], dim);

    /// `x * y`, each element with its own.
    mul() by Multiplies: zip_product, |x, y| x.mul(y);

    /// `x * y`, repeated where a dim has size 1.
    broadcast_mul() by Multiplies: zip_product, |x, y| x.broadcast_mul(y);

    /// The product of two matrices, or of two batches of them.
    matmul() by Multiplies: zip_product, |x, y| x.matmul(y);

    /// The product of batches of matrices, repeated where a dim has size 1.
    broadcast_matmul() by Multiplies: zip_product, |x, y| x.broadcast_matmul(y);

    /// `x / y`, each element by its own.
    div() by Joins: zip, |x, y| x.div(y);

    /// `x / y`, repeated where a dim has size 1.
    broadcast_div() by Joins: zip, |x, y| x.broadcast_div(y);

    /// The indices of `dim` that `other` lists. `other` is u32, u8 or i64, of shape `[indices]`.
    index_select(dim: impl Dim) by Joins: zip, |x, y| x.index_select(y, dim);

    /// For each element of `other`, the element of `x` at that index of `dim` and the same indices of the other dims.
    gather_along(dim: impl Dim) by Joins: zip, |x, y| x.gather(y, dim);
}

fn in_our_errors(
    function: impl FnOnce(&Tensor, &Tensor) -> CandleResult<Tensor>,
) -> impl FnOnce(&Tensor, &Tensor) -> Result<Tensor, Error> {
    |x, y| Ok(function(x, y)?)
}
