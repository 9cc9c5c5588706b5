//! What an autograd brings, so that its tensors can be carried by [`Dist`](super::Dist).

use std::fmt::Debug;

use hsdp_comm::{Group, Tag};

use crate::collective::Collective;
use crate::error::Error;

/// An autograd, on whose tensors collectives are recorded.
///
/// Collectives go over the first dim: parts are rows. The trait is of the autograd, not of its tensor, so that a crate can
/// bring it that owns neither the tensor nor this trait; an autograd without tensors of others is its own tensor.
pub trait Carrier: Debug + Sized {
    /// Its tensor. The clone of a tensor is the same tensor.
    type Tensor: Clone + Debug;

    /// What it fails with.
    type Error: From<Error>;

    /// What a backward leaves: the gradients of leaves and of what else was asked for.
    type Gradients;

    /// Applies a collective, and records it so that a backward comes through it: also where the input needs no gradient
    /// on this rank, since it may on others, and after the backwards of all that were recorded later.
    ///
    /// # Errors
    /// Those of [`Collective::forward`], a dtype without gradients, and the autograd's own.
    fn apply(call: &Call<'_, Self::Tensor>) -> Result<Applied<Self::Tensor>, Self::Error>;

    /// The same elements as `tensor`, as another tensor: the two have gradients of their own.
    ///
    /// # Errors
    /// The autograd's.
    fn alias(tensor: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Goes back from `loss`, a scalar whose cotangent is 1, and through `last` before all else.
    ///
    /// # Errors
    /// The autograd's, and those of the collectives.
    fn backward(
        loss: &Self::Tensor,
        last: Option<&Self::Tensor>,
    ) -> Result<Self::Gradients, Self::Error>;

    /// The gradient of `tensor`, if the loss depends on it.
    fn gradient(gradients: &Self::Gradients, tensor: &Self::Tensor) -> Option<Self::Tensor>;
}

/// A collective to be applied, to what, and where.
#[derive(Debug)]
pub struct Call<'a, T> {
    /// What is applied.
    pub collective: &'a Collective,
    /// To what.
    pub input: &'a T,
    /// Among whom.
    pub group: &'a Group,
    /// What the others are told that it is for.
    pub tag: Tag,
    /// What makes the collective that was recorded before this one a parent of this one; `None` for the first.
    pub after: Option<&'a T>,
    /// Whether there will be a backward.
    pub record: Record,
}

/// Whether collectives are recorded for a backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// All are, on all ranks; what has no gradient is refused.
    Gradients,
    /// None is: there will be no backward.
    Nothing,
}

/// What came of a collective.
#[derive(Clone, Debug)]
pub struct Applied<T> {
    /// This rank's output, if it has one.
    pub output: Option<T>,
    /// What stands for it as a parent of the next one: the output, or a scalar where there is none. `None` if nothing was
    /// recorded.
    pub link: Option<T>,
}
