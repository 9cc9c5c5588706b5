//! The traits that a model is written against. They provide units by name, and their parameters by
//! name.
//!
//! A model that uses these two traits is ordinary candle code. [`Pass`](crate::Pass) runs it
//! sharded, and [`Plain`](crate::Plain) runs it on whole [`Var`](candle_core::Var)s.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use hsdp_sharding::ModelSpec;

/// Provides a unit's forward with its parameters.
///
/// Layers whose constructors take a `VarBuilder` read them through
/// [`var_builder`](crate::var_builder).
pub trait Parameters: Sync {
    /// Returns the parameter with this name or alias, in full, in the declared shape and the
    /// compute dtype of the unit that holds it.
    ///
    /// Two calls with one name return the same tensor, so its gradient comes in one piece.
    ///
    /// # Errors
    /// If the model has no such parameter, or it cannot be gathered.
    fn get(&self, name: &str) -> Result<Tensor>;

    /// Returns the description of the model, with the declared shape of each parameter.
    fn spec(&self) -> &ModelSpec;

    /// Returns the compute dtype of the unit whose forward reads. Its own parameters have that
    /// dtype.
    fn dtype(&self) -> DType;

    /// Returns the device of all parameters.
    fn device(&self) -> &Device;
}

/// A unit's forward: from its parameters and its input to its output.
pub type Forward<'a> = &'a mut dyn FnMut(&dyn Parameters, &Tensor) -> Result<Tensor>;

/// A unit's forward that may run twice, in the forward and again in the backward. Both outputs must
/// have the same bits.
pub type RepeatableForward = Arc<dyn Fn(&dyn Parameters, &Tensor) -> Result<Tensor> + Send + Sync>;

/// Runs a model unit by unit.
pub trait Units {
    /// Runs `forward` with the parameters of the unit `name`, which may be freed when it returns.
    /// If any unit of the model [declares](hsdp_sharding::Unit::compute_in) its compute dtype, each
    /// unit gets its float input in its own compute dtype.
    ///
    /// # Errors
    /// If there is no such unit, its parameters cannot be gathered, or `forward` fails.
    fn unit(&self, name: &str, input: &Tensor, forward: Forward<'_>) -> Result<Tensor>;

    /// Runs a unit as [`unit`](Self::unit) does. An implementation may drop the tensors that
    /// `forward` makes, and run it again in the backward (activation checkpointing), as
    /// [`Pass`](crate::Pass::recomputed) does. This default runs `forward` once.
    ///
    /// # Errors
    /// The errors of [`unit`](Self::unit).
    fn recomputed(&self, name: &str, input: &Tensor, forward: RepeatableForward) -> Result<Tensor> {
        self.unit(name, input, &mut |parameters, input| forward(parameters, input))
    }

    /// Casts the output of the model to its output dtype. Without one, the output is unchanged.
    ///
    /// # Errors
    /// If candle cannot cast to that dtype.
    fn output(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.clone())
    }
}
