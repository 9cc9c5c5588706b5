//! Checks of a caller's gradients.

use hsdp_sharding::step::Refused;
use hsdp_sharding::{Role, UnitId};

use crate::error::Error;
use crate::state::context::Context;
use crate::step::unit_gradients::UnitGradients;

/// Checks that the model has the unit, and that the gradients are those of the unit: at most one
/// for each parameter, none for frozen ones, each of its size.
pub(crate) fn gradients(
    context: &Context,
    step: u64,
    unit: UnitId,
    gradients: &UnitGradients,
) -> Result<(), Error> {
    let units = context.plan.spec().units().len();
    if unit.index() >= units {
        let what = Refused::NoSuchUnit { unit, units }.to_string();
        return Err(context.misuse("reduce", step, what));
    }
    let entries = &gradients.entries;
    let slots = context.plan.layout(unit).params();
    let parameters = &context.plan.spec()[unit].params;
    let size = |name: &str, got, want| {
        Err(Error::Size {
            operation: "reduce",
            name: name.to_owned(),
            rank: context.rank(),
            got,
            want,
        })
    };
    if entries.len() != parameters.len() {
        let what = format!(
            "unit {} has {} parameters, {} gradients were given",
            context.plan.spec()[unit].name,
            parameters.len(),
            entries.len()
        );
        return Err(context.misuse("reduce", step, what));
    }
    for ((slot, parameter), gradient) in slots.iter().zip(parameters).zip(entries) {
        let Some(gradient) = gradient else { continue };
        if parameter.role == Role::Frozen {
            let what = format!("parameter {} is frozen and was given a gradient", &parameter.name);
            return Err(context.misuse("reduce", step, what));
        }
        if gradient.len() != slot.len {
            return size(&parameter.name, gradient.len(), slot.len);
        }
    }
    Ok(())
}
