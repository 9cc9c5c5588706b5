//! The interface of an autograd whose tensors [`Dist`](super::Dist) can carry.

use std::fmt::Debug;

use hsdp_comm::{Group, Tag};

use crate::autograd::operation::Collective;
use crate::error::Error;

/// An autograd, on whose tensors collectives are recorded.
///
/// Collectives go over the first dim: parts are rows. A type for the autograd has the trait, not the tensor, so that a
/// crate can implement it that owns neither the tensor nor this trait. An autograd that owns its tensor may use the
/// tensor as that type.
pub trait Carrier: Debug + Sized {
    /// The autograd's tensor. The clone of a tensor is the same tensor.
    type Tensor: Clone + Debug;

    /// The autograd's error.
    type Error: From<Error>;

    /// The result of a backward: the gradients of leaves, and of other tensors that were asked for.
    type Gradients;

    /// Applies a collective, and records it so that a backward goes through it, after the backwards of all collectives
    /// that were recorded later. It is recorded also where the input needs no gradient on this rank, since it may need
    /// one on others.
    ///
    /// # Errors
    /// Errors of [`Collective::forward`], a dtype without gradients, and errors of the autograd.
    fn apply(call: &Call<'_, Self::Tensor>) -> Result<Applied<Self::Tensor>, Self::Error>;

    /// The same elements as `tensor`, as another tensor: the two have gradients of their own.
    ///
    /// # Errors
    /// The autograd's.
    fn alias(tensor: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Runs the backward from `loss`, a scalar whose cotangent is 1. It goes through `last` before all else.
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

/// A collective to be applied, with its input and its group.
#[derive(Debug)]
pub struct Call<'a, T> {
    /// The collective.
    pub collective: &'a Collective,
    /// The input.
    pub input: &'a T,
    /// The group whose members apply it.
    pub group: &'a Group,
    /// The tag of the collective, the same on all members.
    pub tag: Tag,
    /// The [`link`](Applied::link) of the collective that was recorded before this one; `None` for the first. It
    /// becomes a parent of this one.
    pub after: Option<&'a T>,
    /// Whether there will be a backward.
    pub record: Record,
}

/// Whether collectives are recorded for a backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// All collectives are recorded, on all ranks. An element type without a gradient is refused.
    Gradients,
    /// No collective is recorded: there will be no backward.
    Nothing,
}

/// The result of a collective.
#[derive(Clone, Debug)]
pub struct Applied<T> {
    /// This rank's output, if it has one.
    pub output: Option<T>,
    /// The tensor that stands for the collective as a parent of the next one. `None` if nothing was
    /// recorded.
    pub link: Option<T>,
}
