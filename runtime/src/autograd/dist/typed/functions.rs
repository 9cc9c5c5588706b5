//! Functions of values: they move nothing, and are allowed in the states in which they are correct.

use super::Dist;
use crate::autograd::dist::carrier::Carrier;
use crate::autograd::dist::rules::{Adds, Free, Joins, Multiplies};
use crate::autograd::dist::state::State;

/// # Functions of values
///
/// Each rank applies them to its own tensor. The captures of a closure are not checked: it should use no other
/// distributed tensor than its arguments, and nothing that differs from rank to rank, except where the output is
/// Varying. A value that a rank multiplies by a factor of its own must be Varying: use
/// [`to_varying`](Self::to_varying), or a factor that is a Varying value.
impl<C: Carrier, R: State, S: State> Dist<C, R, S> {
    /// Applies any function to the tensor. A Partial value is refused: the result would be the function of a term.
    ///
    /// # Errors
    /// The error of `function`.
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

    /// Applies a linear function to the tensor: the sum of its outputs is its output for the sum. The caller guarantees
    /// that.
    ///
    /// # Errors
    /// The error of `function`.
    pub fn map_linear(
        &self,
        function: impl FnOnce(&C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        self.tagged.map_linear(function).map(Self::new)
    }

    /// Applies any function to two tensors.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if the values are on two tapes; the error of `function`.
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

    /// Applies a function that is linear in two tensors together, such as their sum. The caller guarantees that.
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

    /// Applies a function that is linear in each of two tensors, such as their product. The caller guarantees that.
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
