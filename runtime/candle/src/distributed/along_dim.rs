//! Collectives that split or join tensors along any dim.

use candle_core::Tensor;
use candle_core::shape::Dim;
use hsdp::dist::{self, Along, MeshAxis, Own, Reduces, Replicate, Sliced, State, Varying};

use super::{Candle, Functions as _};
use crate::error::Error;

/// The type of a value whose state along `A` becomes `Q`.
type With<D, A, Q> = <D as Along<A>>::With<Q>;

/// Collectives that split or join tensors along any dim. A dim that is not the first is transposed
/// to the front and back, which takes two copies.
///
/// **Collective**, like the methods of [`Dist`](dist::Dist) without `_dim`. They fail as those
/// methods do, and if there is no such dim.
#[expect(clippy::missing_errors_doc, reason = "one sentence above says it of all")]
pub trait AlongDim: Sized {
    /// Gathers all ranks' parts, and joins them along `dim` in the order of the ranks. Each rank
    /// uses the result in its own way.
    fn all_gather_dim<A>(&self, axis: A, dim: impl Dim) -> Result<With<Self, A, Replicate>, Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = Candle>,
        <Self as Along<A>>::State: Own,
        With<Self, A, Replicate>: Turned;

    /// Reduces all ranks' elements, and gives each rank its part along `dim`.
    fn reduce_scatter_dim<A, Q>(
        &self,
        axis: A,
        reduction: Q,
        dim: impl Dim,
    ) -> Result<With<Self, A, Varying>, Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = Candle>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
        With<Self, A, Varying>: Turned;

    /// Returns this rank's part, along `dim`, of a value that all ranks hold.
    fn slice_dim<A>(&self, axis: A, dim: impl Dim) -> Result<With<Self, A, Varying>, Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = Candle>,
        <Self as Along<A>>::State: Sliced,
        With<Self, A, Varying>: Turned;
}

impl<R: State, S: State> AlongDim for dist::Dist<Candle, R, S> {
    fn all_gather_dim<A>(&self, axis: A, dim: impl Dim) -> Result<With<Self, A, Replicate>, Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = Candle>,
        <Self as Along<A>>::State: Own,
        With<Self, A, Replicate>: Turned,
    {
        let dim = place(self.tensor(), dim)?;
        self.turned(dim)?.all_gather(axis)?.turned(dim)
    }

    fn reduce_scatter_dim<A, Q>(
        &self,
        axis: A,
        reduction: Q,
        dim: impl Dim,
    ) -> Result<With<Self, A, Varying>, Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = Candle>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
        With<Self, A, Varying>: Turned,
    {
        let dim = place(self.tensor(), dim)?;
        self.turned(dim)?.reduce_scatter(axis, reduction)?.turned(dim)
    }

    fn slice_dim<A>(&self, axis: A, dim: impl Dim) -> Result<With<Self, A, Varying>, Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = Candle>,
        <Self as Along<A>>::State: Sliced,
        With<Self, A, Varying>: Turned,
    {
        let dim = place(self.tensor(), dim)?;
        self.turned(dim)?.slice(axis)?.turned(dim)
    }
}

fn place(tensor: &Tensor, dim: impl Dim) -> Result<usize, Error> {
    Ok(dim.to_index(tensor.shape(), "a collective along a dim")?)
}

/// A candle value in any states with dims that can be exchanged.
pub trait Turned: Sized {
    /// Returns the value with its first dim and `dim` exchanged. Not collective.
    ///
    /// # Errors
    /// [`Error::Candle`] if there is no such dim.
    fn turned(&self, dim: usize) -> Result<Self, Error>;
}

impl<R: State, S: State> Turned for dist::Dist<Candle, R, S> {
    fn turned(&self, dim: usize) -> Result<Self, Error> {
        self.transpose(0, dim)
    }
}
