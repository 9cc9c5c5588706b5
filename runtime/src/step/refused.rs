//! The errors of calls that have no place in the order of a step.

use hsdp_sharding::step::Refused;
use hsdp_sharding::{AfterForward, UnitId};

use crate::error::{DataError, Error};
use crate::state::context::Context;
use crate::step::step_state::GRADIENTS_BEFORE_LOSS;

/// The call that was refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) operation: &'static str,
    pub(super) step: u64,
    /// Number of steps that an optimizer has completed.
    pub(super) committed: u64,
}

/// Returns the error of a call that the machine of the step has refused.
pub(super) fn error(context: &Context, call: Call, refused: Refused) -> Error {
    let Call { operation, step, committed } = call;
    let name = |unit: UnitId| &context.plan.spec()[unit].name;
    let what = match refused {
        Refused::UnevenInputs { microbatch, supply } => {
            return Error::Data(DataError::UnevenInputs { step, microbatch, supply });
        }
        Refused::UnevenEnds { ending, ready } => {
            return Error::Data(DataError::UnevenEnds { step, committed, ending, ready });
        }
        Refused::NoData { supply } => {
            return Error::Data(DataError::EndOfData { step, microbatch: Some(0), supply });
        }
        Refused::BeforeLoss { .. } => {
            "the backward pass begins with `loss`: ranks agree on a weight in that call".to_owned()
        }
        Refused::NoGatherLeft { unit, microbatch } => {
            let advice = match context.plan.spec()[unit].after_forward {
                AfterForward::Discard => "a gradient reaches it: do not mark it `forward_only`",
                _ => "hold on to it, or mark it `keep` to use it more than once",
            };
            format!(
                "unit {} has been gathered as often as the plan says for microbatch {microbatch}; \
                 {advice}",
                name(unit)
            )
        }
        Refused::OutOfOrder { unit, after } => format!(
            "unit {} is used after unit {}, which is declared behind it: declare the units in the \
             order of the forward, or choose UnitOrder::Follow",
            name(unit),
            name(after)
        ),
        Refused::SecondLoss { .. } => "this microbatch has its loss already".to_owned(),
        Refused::GradientsBeforeLoss { .. } => GRADIENTS_BEFORE_LOSS.to_owned(),
        Refused::Twice { unit, microbatch } => format!(
            "unit {} was reduced in microbatch {microbatch} before: add its gradients up, and reduce \
             their sum once",
            name(unit)
        ),
        Refused::TooLate { unit, microbatch } => format!(
            "the gradients of unit {} come too late in microbatch {microbatch}: a unit that follows \
             in the backward was unsharded before, and zeros were reduced in their place. Where \
             processes compute on devices, a unit is reduced before the next one is unsharded; with \
             Unused::Zeros, units are reduced at the end of the microbatch",
            name(unit)
        ),
        refused => refused.to_string(),
    };
    context.misuse(operation, step, what)
}
