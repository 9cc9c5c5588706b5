//! Gradients that exist on every rank.

use hsdp::dist::{self, Axes, Gradients, State};

use super::Candle;
use crate::error::Error;

/// Returns the gradient of `value`, in the state of its cotangents, as [`Gradients::of`] does.
/// Returns zeros if this rank's loss does not depend on `value`. Not collective.
///
/// A gradient for an all-reduce must exist on all ranks, also on a rank with an empty batch.
///
/// # Errors
/// [`hsdp::Error::Collective`] if there is no gradient and `value` is not a variable: candle keeps
/// the gradients of variables only. [`Error::Candle`] if candle fails.
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
        "the tensor {shape:?} of {dtype} is not a variable, and candle keeps the gradients of variables only"
    );
    let rank = value.tape().group(Axes::Both).rank();
    Err(hsdp::Error::Collective { operation: "gradient_of", rank, what }.into())
}
