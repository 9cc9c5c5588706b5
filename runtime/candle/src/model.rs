//! The traits that a model is written against: units by name, and in them parameters by name.
//!
//! A model written against these two traits is ordinary candle code. [`Pass`](crate::Pass) runs it
//! sharded, [`Plain`](crate::Plain) runs it on whole [`Var`](candle_core::Var)s.

use candle_core::{Result, Tensor};

/// Gives a unit's forward its parameters.
pub trait Parameters {
    /// The parameter with this name or alias, in full, in the compute dtype and the declared shape.
    ///
    /// Two calls with one name return the same tensor, so its gradient comes in one piece.
    ///
    /// # Errors
    /// If the model has no such parameter, or it cannot be gathered.
    fn get(&self, name: &str) -> Result<Tensor>;
}

/// A unit's forward: from its parameters and its input to its output.
pub type Forward<'a> = &'a mut dyn FnMut(&dyn Parameters, &Tensor) -> Result<Tensor>;

/// Runs a model unit by unit.
pub trait Units {
    /// Runs `forward` with the parameters of the unit `name`, which may be freed when it returns.
    ///
    /// # Errors
    /// If there is no such unit, its parameters cannot be gathered, or `forward` fails.
    fn unit(&self, name: &str, input: &Tensor, forward: Forward<'_>) -> Result<Tensor>;

    /// Casts the output of the model to its output dtype. Without one, the output is unchanged.
    ///
    /// # Errors
    /// If candle cannot cast to that dtype.
    fn output(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.clone())
    }
}
