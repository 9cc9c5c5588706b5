//! Checks of a caller's unit and gradients.

use hsdp_sharding::{Role, UnitId};

use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::unit_gradients::UnitGradients;

/// Checks that the model has the unit.
pub(crate) fn unit(
    fabric: &Fabric,
    step: u64,
    unit: UnitId,
    operation: &'static str,
) -> Result<(), Error> {
    let units = fabric.plan.spec().units().len();
    if unit.index() < units {
        return Ok(());
    }
    let what = format!("there is no unit {}, the model has {units}", unit.index());
    Err(fabric.misuse(operation, step, what))
}

/// Checks that the gradients are those of the unit: at most one for each parameter, none for frozen ones, each of its
/// size.
pub(crate) fn gradients(
    fabric: &Fabric,
    step: u64,
    unit: UnitId,
    gradients: &UnitGradients,
) -> Result<(), Error> {
    let entries = &gradients.entries;
    let slots = fabric.plan.layout(unit).params();
    let parameters = &fabric.plan.spec()[unit].params;
    let size = |name: &str, got, want| {
        Err(Error::Size {
            operation: "reduce",
            name: name.to_owned(),
            rank: fabric.rank(),
            got,
            want,
        })
    };
    if entries.len() != parameters.len() {
        let what = format!(
            "unit {} has {} parameters, {} gradients were given",
            fabric.plan.spec()[unit].name,
            parameters.len(),
            entries.len()
        );
        return Err(fabric.misuse("reduce", step, what));
    }
    for ((slot, parameter), gradient) in slots.iter().zip(parameters).zip(entries) {
        let Some(gradient) = gradient else { continue };
        if parameter.role == Role::Frozen {
            let what = format!("parameter {} is frozen and was given a gradient", &parameter.name);
            return Err(fabric.misuse("reduce", step, what));
        }
        if gradient.len() != slot.len {
            return size(&parameter.name, gradient.len(), slot.len);
        }
    }
    Ok(())
}
