//! Values whose states are types.

mod along;
mod collectives;
mod conversions;
mod functions;

use std::fmt;
use std::marker::PhantomData;

use super::carrier::Carrier;
use super::rules::Loss;
use super::state::State;
use super::tagged::Tagged;
use super::tape::{Gradients, Tape};
use crate::error::Error;

/// A value in state `R` over the replicate axis and `S` over the shard axis. See the [module](super).
///
/// [`Tape::assume`] makes one of a tensor, and [`into_tensor`](Self::into_tensor) gives the tensor back.
pub struct Dist<C: Carrier, R, S> {
    tagged: Tagged<C>,
    states: PhantomData<(R, S)>,
}

impl<C: Carrier, R: State, S: State> Dist<C, R, S> {
    /// The caller has checked that these are the states.
    pub(super) fn new(tagged: Tagged<C>) -> Self {
        debug_assert_eq!(tagged.states(), [R::STATE, S::STATE], "the rules agree");
        Self { tagged, states: PhantomData }
    }

    /// This rank's tensor.
    #[must_use]
    pub fn tensor(&self) -> &C::Tensor {
        self.tagged.tensor()
    }

    /// This rank's tensor. Its further use is not checked.
    #[must_use]
    pub fn into_tensor(self) -> C::Tensor {
        self.tagged.into_tensor()
    }

    /// The tape.
    #[must_use]
    pub fn tape(&self) -> &Tape<C> {
        self.tagged.tape()
    }

    /// The same value with its states known at run time.
    #[must_use]
    pub fn as_tagged(&self) -> &Tagged<C> {
        &self.tagged
    }

    /// The same value with its states known at run time.
    #[must_use]
    pub fn into_tagged(self) -> Tagged<C> {
        self.tagged
    }
}

impl<C: Carrier, R: State, S: State> Dist<C, R, S> {
    /// Runs the backward from this loss, a scalar, through every collective of its tape.
    ///
    /// A Partial loss is a term of the global loss, which is the sum of all ranks' terms. An Invariant one is the global
    /// loss, which all ranks hold.
    ///
    /// **Collective**: over all groups of the tape's collectives, in the reverse of their order, whatever the loss depends
    /// on.
    ///
    /// # Errors
    /// [`Error::Collective`] if its tape records nothing; the errors of [`Carrier::backward`].
    pub fn backward(&self) -> Result<Gradients<C>, C::Error>
    where
        R: Loss,
        S: Loss,
    {
        self.tagged.backward()
    }
}

impl<C: Carrier> Tape<C> {
    /// Makes a value of `tensor`, in the states that the caller names: `R` over the replicate axis, `S` over the shard
    /// axis.
    ///
    /// The states are not checked: ranks whose Replicate values differ compute different results.
    #[must_use]
    pub fn assume<R: State, S: State>(&self, tensor: C::Tensor) -> Dist<C, R, S> {
        Dist::new(self.tag(tensor, [R::STATE, S::STATE]))
    }
}

impl<C: Carrier> Gradients<C> {
    /// The gradient of `value`, in the state of its cotangents; `None` if the loss does not depend on it on this rank,
    /// or if the autograd has not kept it.
    ///
    /// For a Replicate value each rank has its own term (Partial), which needs an all_reduce before an optimizer uses
    /// it. For an Invariant value all ranks have the whole gradient.
    #[must_use]
    pub fn of<R: State, S: State>(
        &self,
        value: &Dist<C, R, S>,
    ) -> Option<Dist<C, R::Cotangent, S::Cotangent>> {
        self.of_tagged(value.as_tagged()).map(Dist::new)
    }
}

/// Checks at run time that the states are those of the type: [`Error::State`] if not.
impl<C: Carrier, R: State, S: State> TryFrom<Tagged<C>> for Dist<C, R, S> {
    type Error = Error;

    fn try_from(tagged: Tagged<C>) -> Result<Self, Error> {
        tagged.expect([R::STATE, S::STATE])?;
        Ok(Self::new(tagged))
    }
}

impl<C: Carrier, R, S> Clone for Dist<C, R, S> {
    fn clone(&self) -> Self {
        Self { tagged: self.tagged.clone(), states: PhantomData }
    }
}

impl<C: Carrier, R: State, S: State> fmt::Debug for Dist<C, R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dist<{}, {}>({:?})", R::STATE, S::STATE, self.tensor())
    }
}
