//! Gradients that every rank has.

use hsdp::dist::{self, Gradients, State};

use super::Candle;
use crate::error::Error;

/// The gradient of `value`, in the state of its cotangents, as [`Gradients::of`] has it; zeros where the loss does not depend
/// on it here. Not collective.
///
/// What is to be all-reduced must be there on all ranks, also on one whose batch was empty.
///
/// # Errors
/// What candle fails with.
pub fn gradient_of<R: State, S: State>(
    gradients: &Gradients<Candle>,
    value: &dist::Dist<Candle, R, S>,
) -> Result<dist::Dist<Candle, R::Cotangent, S::Cotangent>, Error> {
    if let Some(gradient) = gradients.of(value) {
        return Ok(gradient);
    }
    Ok(value.tape().assume(value.tensor().zeros_like()?))
}
