//! The everyday functions of two values.

use candle_core::Tensor;
use candle_core::shape::Dim;
use hsdp::dist::{Adds, Dist, Joins, Multiplies, State};

use super::Candle;
use crate::error::Error;

/// candle's functions of two tensors, each for the pairs of states in which it means what it says: sums by [`Adds`],
/// products by [`Multiplies`], others by [`Joins`]. What is not here: [`zip`](Dist::zip) and its kin.
///
/// ```compile_fail,E0277
/// # use hsdp::dist::{Invariant, Replicate, Varying};
/// # use hsdp_candle::distributed::{Dist, Pairs};
/// fn wrong(x: &Dist<Replicate, Varying>, w: &Dist<Replicate, Invariant>) {
///     let _ = x.matmul(w); // no: w is not shared yet, and its gradient would be one rank's
/// }
/// ```
///
/// All fail with what candle fails with, and with [`hsdp::Error::State`] if the values are of two tapes.
#[expect(clippy::missing_errors_doc, reason = "one sentence above says it of all")]
pub trait Pairs<R: State, S: State>: Sized {
    /// `x + y`.
    fn add<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>;

    /// `x - y`.
    fn sub<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>;

    /// `x + y`, repeated where a dim has size 1.
    fn broadcast_add<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>;

    /// `x - y`, repeated where a dim has size 1.
    fn broadcast_sub<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>;

    /// The elements of both, one after the other along `dim`.
    fn cat<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
        dim: impl Dim,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>;

    /// `x * y`, each element with its own.
    fn mul<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>;

    /// `x * y`, repeated where a dim has size 1.
    fn broadcast_mul<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>;

    /// The product of two matrices, or of two batches of them.
    fn matmul<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>;

    /// The product of batches of matrices, repeated where a dim has size 1.
    fn broadcast_matmul<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>;

    /// `x / y`, each element by its own.
    fn div<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Joins<R>,
        S2: Joins<S>;

    /// `x / y`, repeated where a dim has size 1.
    fn broadcast_div<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Joins<R>,
        S2: Joins<S>;

    /// The places of `dim` that `other` lists: its elements are u32, u8 or i64, its shape is `[places]`.
    fn index_select<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
        dim: impl Dim,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Joins<R>,
        S2: Joins<S>;

    /// For each element of `other`, the one of `x` at that place of `dim`, and at the same places of the other dims.
    fn gather_along<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
        dim: impl Dim,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Joins<R>,
        S2: Joins<S>;
}

impl<R: State, S: State> Pairs<R, S> for Dist<Candle, R, S> {
    fn add<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>,
    {
        self.zip_sum(other, |x, y| Ok(x.add(y)?))
    }

    fn sub<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>,
    {
        self.zip_sum(other, |x, y| Ok(x.sub(y)?))
    }

    fn broadcast_add<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>,
    {
        self.zip_sum(other, |x, y| Ok(x.broadcast_add(y)?))
    }

    fn broadcast_sub<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>,
    {
        self.zip_sum(other, |x, y| Ok(x.broadcast_sub(y)?))
    }

    fn cat<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
        dim: impl Dim,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Adds<R>,
        S2: Adds<S>,
    {
        self.zip_sum(other, |x, y| Ok(Tensor::cat(&[x, y], dim)?))
    }

    fn mul<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>,
    {
        self.zip_product(other, |x, y| Ok(x.mul(y)?))
    }

    fn broadcast_mul<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>,
    {
        self.zip_product(other, |x, y| Ok(x.broadcast_mul(y)?))
    }

    fn matmul<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>,
    {
        self.zip_product(other, |x, y| Ok(x.matmul(y)?))
    }

    fn broadcast_matmul<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>,
    {
        self.zip_product(other, |x, y| Ok(x.broadcast_matmul(y)?))
    }

    fn div<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Joins<R>,
        S2: Joins<S>,
    {
        self.zip(other, |x, y| Ok(x.div(y)?))
    }

    fn broadcast_div<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Joins<R>,
        S2: Joins<S>,
    {
        self.zip(other, |x, y| Ok(x.broadcast_div(y)?))
    }

    fn index_select<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
        dim: impl Dim,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Joins<R>,
        S2: Joins<S>,
    {
        self.zip(other, |x, y| Ok(x.index_select(y, dim)?))
    }

    fn gather_along<R2, S2>(
        &self,
        other: &Dist<Candle, R2, S2>,
        dim: impl Dim,
    ) -> Result<Dist<Candle, R2::Output, S2::Output>, Error>
    where
        R2: Joins<R>,
        S2: Joins<S>,
    {
        self.zip(other, |x, y| Ok(x.gather(y, dim)?))
    }
}
