//! Gradients that every rank has.

use hsdp::dist::{self, Axes, Gradients, State};

use super::Candle;
use crate::error::Error;

/// The gradient of `value`, in the state of its cotangents, as [`Gradients::of`] has it; zeros where the loss does not depend
/// on it here. Not collective.
///
/// What is to be all-reduced must be there on all ranks, also on one whose batch was empty.
///
/// # Errors
/// [`hsdp::Error::Collective`] if it is no variable: candle has no gradient of it, whatever the loss depends on. What candle
/// fails with.
pub fn gradient_of<R: State, S: State>(
    gradients: &Gradients<Candle>,
    value: &dist::Dist<Candle, R, S>,
) -> Result<dist::Dist<Candle, R::Cotangent, S::Cotangent>, Error> {
    if let Some(gradient) = gradients.of(value) {
        return Ok(gradient);
    }
    let tensor = value.tensor();
    if tensor.is_variable() {
        return Ok(gradients.tape().assume(tensor.zeros_like()?));
    }
    let (shape, dtype) = (tensor.shape(), tensor.dtype().as_str());
    let what = format!(
        "the tensor {shape:?} of {dtype} is no variable, and candle keeps the gradients of variables alone"
    );
    let rank = value.tape().group(Axes::Both).rank();
    Err(hsdp::Error::Collective { operation: "gradient_of", rank, what }.into())
}
