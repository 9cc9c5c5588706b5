//! Trainable parameters that got no gradient in a step.

use hsdp_sharding::Role;

use crate::agree::agreement::Agreement;
use crate::error::{Error, GradientError, Without};
use crate::options::Unused;
use crate::state::context::Context;

/// Refuses a step with parameters that got no gradient on some rank, under
/// [`Unused::ErrorOnAnyRank`]. All ranks come to the same end.
///
/// # Errors
/// [`GradientError::UnusedParameters`](crate::GradientError::UnusedParameters).
pub(super) fn check_each_rank(
    context: &Context,
    step: u64,
    agreement: &Agreement,
) -> Result<(), Error> {
    if context.options.unused != Unused::ErrorOnAnyRank {
        return Ok(());
    }
    let objective = context.options.objective;
    let without = |number| (context.name_of(number), agreement.ranks_without(number, objective));
    let unused = trainable(context).map(without).filter(|(_, ranks)| !ranks.is_empty());
    let parameters: Vec<_> = unused.collect();
    if parameters.is_empty() {
        return Ok(());
    }
    Err(Error::Gradients(GradientError::UnusedParameters {
        step,
        parameters,
        causes: context.unused.causes(),
    }))
}

/// Refuses the first step, or warns of it on rank 0, if parameters got no gradient on any rank. A
/// model that has made steps before, in another process, is not refused. A step that is refused,
/// and one without data, is followed by another first step. All ranks come to the same end.
///
/// # Errors
/// [`GradientError::WithoutGradient`](crate::GradientError::WithoutGradient).
pub(super) fn check_first(
    context: &Context,
    step: u64,
    agreement: &Agreement,
) -> Result<(), Error> {
    let policy = context.options.unused;
    let is_over = policy == Unused::ErrorOnAnyRank || context.unused.is_checked();
    if is_over || !agreement.had_data(context.options.objective) {
        return Ok(());
    }
    let anywhere = agreement.present_anywhere();
    let unused = trainable(context).filter(|number| !anywhere.contains(*number));
    let parameters: Vec<String> = unused.map(|number| context.name_of(number)).collect();
    if !parameters.is_empty() && policy != Unused::Zeros {
        let (trainable, causes) = (trainable(context).count(), context.unused.causes());
        if policy == Unused::ErrorInFirstStep && !context.unused.is_trained() {
            return Err(Error::Gradients(GradientError::WithoutGradient {
                step,
                trainable,
                parameters,
                causes,
            }));
        }
        if context.rank().index() == 0 {
            let without = Without::of(&parameters, trainable);
            let (count, names) = (without.count(), without.names());
            hsdp_warnings::warn!(step, "{count}, and are not updated{causes}: {names}");
        }
    }
    context.unused.set_checked();
    Ok(())
}

/// Returns the numbers of the trainable parameters.
fn trainable(context: &Context) -> impl Iterator<Item = usize> {
    (0..context.parameters()).filter(|number| {
        let id = context.parameter(*number);
        context.plan.spec()[id].role == Role::Trainable
    })
}
