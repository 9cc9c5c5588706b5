//! Functions of values: they move nothing, and are allowed where they mean what they say.

use super::Dist;
use crate::dist::carrier::Carrier;
use crate::dist::rules::{Adds, Free, Joins, Multiplies};
use crate::dist::state::State;

/// # Functions of values
///
/// Each rank applies them to its own tensor. What a closure captures is not checked: it should use no other distributed tensor
/// than those it is given, and nothing that differs from rank to rank, but where the output is Varying. What a rank multiplies
/// by a factor of its own is Varying first: [`to_varying`](Self::to_varying), or a factor that is a Varying value.
impl<C: Carrier, R: State, S: State> Dist<C, R, S> {
    /// Any function of the tensor. Not of a Partial value, of which it would be the function of a term.
    ///
    /// # Errors
    /// What `function` fails with.
    pub fn map(
        &self,
        function: impl FnOnce(&C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error>
    where
        R: Free,
        S: Free,
    {
        self.tagged.map(function).map(Self::new)
    }

    /// A function of the tensor that is linear: of which the sum of the outputs is the output of the sum. The caller answers
    /// for that.
    ///
    /// # Errors
    /// What `function` fails with.
    pub fn map_linear(
        &self,
        function: impl FnOnce(&C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        self.tagged.map_linear(function).map(Self::new)
    }

    /// Any function of two tensors.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if the values are of two tapes; what `function` fails with.
    pub fn zip<R2, S2>(
        &self,
        other: &Dist<C, R2, S2>,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Dist<C, R2::Output, S2::Output>, C::Error>
    where
        R2: Joins<R>,
        S2: Joins<S>,
    {
        self.tagged.zip(&other.tagged, function).map(Dist::new)
    }

    /// A function that is linear in two tensors together, such as their sum. The caller answers for that.
    ///
    /// # Errors
    /// As [`zip`](Self::zip).
    pub fn zip_sum<R2, S2>(
        &self,
        other: &Dist<C, R2, S2>,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Dist<C, R2::Output, S2::Output>, C::Error>
    where
        R2: Adds<R>,
        S2: Adds<S>,
    {
        self.tagged.zip_sum(&other.tagged, function).map(Dist::new)
    }

    /// A function that is linear in each of two tensors, such as their product. The caller answers for that.
    ///
    /// # Errors
    /// As [`zip`](Self::zip).
    pub fn zip_product<R2, S2>(
        &self,
        other: &Dist<C, R2, S2>,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Dist<C, R2::Output, S2::Output>, C::Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>,
    {
        self.tagged.zip_product(&other.tagged, function).map(Dist::new)
    }
}
