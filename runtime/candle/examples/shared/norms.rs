//! Norms of each parameter in every so many steps: `--norms-every`.

use std::path::Path;

use hsdp::{Gradients, Norms, ShardedModel};
use serde::{Serialize, Serializer};

use super::failure::Failure;
use super::options::RunOptions;
use super::plot;

/// The norms of a step, by parameter.
#[derive(Debug, Serialize)]
pub(crate) struct StepNorms {
    /// Of the gradients, before clipping.
    #[serde(serialize_with = "by_name")]
    gradients: Norms,
    /// Of the parameters, after the update.
    #[serde(serialize_with = "by_name")]
    parameters: Norms,
    /// The norm of each parameter's change over its norm before; absent if there was no update, or one on a device.
    #[serde(serialize_with = "by_name_if_any", skip_serializing_if = "Option::is_none")]
    updates: Option<Norms>,
}

/// Takes the norms of a step's gradients, if they are recorded in this step, and has the update measured. Collective.
pub(crate) fn before_update(
    model: &ShardedModel,
    gradients: Gradients,
    (options, step): (&RunOptions, usize),
) -> Result<(Gradients, Option<Norms>), Failure> {
    if !options.norms_every.is_some_and(|every| step.is_multiple_of(every)) {
        return Ok((gradients, None));
    }
    let norms = gradients.norms(model)?;
    let gradients = if model.updates_on_device() { gradients } else { gradients.measured() };
    Ok((gradients, Some(norms)))
}

/// The norms of a step that has updated the parameters, if those of its gradients were taken. Collective.
pub(crate) fn after_update(
    model: &ShardedModel,
    gradients: Option<Norms>,
) -> Result<Option<StepNorms>, Failure> {
    let Some(gradients) = gradients else { return Ok(None) };
    let updates = model.last_update().map(|update| update.ratios(model)).transpose()?;
    Ok(Some(StepNorms { gradients, parameters: model.norms()?, updates }))
}

/// The ratios of all updates that were measured, for the plot at the end.
#[derive(Debug, Default)]
pub(crate) struct Ratios(Vec<(usize, Norms)>);

impl Ratios {
    pub(crate) fn add(&mut self, step: usize, norms: Option<StepNorms>) {
        self.0.extend(norms.and_then(|norms| norms.updates).map(|ratios| (step, ratios)));
    }

    /// Draws them, if there are any.
    pub(crate) fn draw(&self, file: &Path) -> Result<(), Failure> {
        if self.0.is_empty() { Ok(()) } else { plot::updates(file, &self.0) }
    }
}

fn by_name<S: Serializer>(norms: &Norms, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(norms.iter())
}

fn by_name_if_any<S: Serializer>(norms: &Option<Norms>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(norms.iter().flat_map(Norms::iter))
}
