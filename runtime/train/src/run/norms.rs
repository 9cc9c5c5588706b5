//! Norms of each parameter in every n-th step: `--norms-every`.

use std::path::Path;

use hsdp::{Gradients, Norms, ShardedModel};
use serde::{Serialize, Serializer};

use crate::failure::Failure;
use crate::folder::plot;

/// Norms of each parameter in a step.
#[derive(Debug, Serialize)]
pub(crate) struct StepNorms {
    /// Norms of the gradients, before clipping.
    #[serde(serialize_with = "by_name")]
    gradients: Norms,
    /// Norms of the parameters, after the update.
    #[serde(serialize_with = "by_name")]
    parameters: Norms,
    /// The norm of each parameter's change over its norm before. `None` if there was no update, or
    /// an update on a device.
    #[serde(serialize_with = "by_name_if_any", skip_serializing_if = "Option::is_none")]
    updates: Option<Norms>,
}

/// Computes the norms of a step's gradients if the step is measured, and requests a measured
/// update. Collective.
pub(crate) fn before_update(
    model: &ShardedModel,
    gradients: Gradients,
    is_measured: bool,
) -> Result<(Gradients, Option<Norms>), Failure> {
    if !is_measured {
        return Ok((gradients, None));
    }
    let norms = gradients.norms(model)?;
    let gradients = if model.updates_on_device() { gradients } else { gradients.measured() };
    Ok((gradients, Some(norms)))
}

/// Returns the norms of a step after its update. `None` if the norms of its gradients were not
/// computed. Collective.
pub(crate) fn after_update(
    model: &ShardedModel,
    gradients: Option<Norms>,
) -> Result<Option<StepNorms>, Failure> {
    let Some(gradients) = gradients else { return Ok(None) };
    let updates = model.last_update().map(|update| update.ratios(model)).transpose()?;
    Ok(Some(StepNorms { gradients, parameters: model.norms()?, updates }))
}

/// Ratios of measured updates, for the plot at the end. Keeps no more steps than the plot has room
/// for.
#[derive(Debug, Default)]
pub(crate) struct Ratios(Spread<(u64, Norms)>);

impl Ratios {
    /// Adds the ratios of a step.
    pub(crate) fn add(&mut self, step: u64, norms: Option<StepNorms>) {
        let Some(ratios) = norms.and_then(|norms| norms.updates) else { return };
        let most = plot::most_columns(ratios.iter().count());
        self.0.add((step, ratios), most);
    }

    /// Draws the ratios, if there are any.
    pub(crate) fn draw(&self, file: &Path) -> Result<(), Failure> {
        if self.0.kept.is_empty() { Ok(()) } else { plot::updates(file, &self.0.kept) }
    }
}

/// An evenly spread selection of the added items: every one, or every second, fourth and so on.
#[derive(Debug)]
struct Spread<T> {
    kept: Vec<T>,
    added: usize,
    /// Number of added items for each kept one.
    of: usize,
}

impl<T> Default for Spread<T> {
    fn default() -> Self {
        Self { kept: Vec::new(), added: 0, of: 1 }
    }
}

impl<T> Spread<T> {
    /// Adds an item, and keeps at most `most` items. `most` is at least 1.
    fn add(&mut self, item: T, most: usize) {
        let is_kept = self.added.is_multiple_of(self.of);
        self.added += 1;
        if !is_kept {
            return;
        }
        self.kept.push(item);
        if self.kept.len() > most {
            let mut index = 0..;
            self.kept.retain(|_| index.next().is_some_and(|it: usize| it.is_multiple_of(2)));
            self.of *= 2;
        }
    }
}

fn by_name<S: Serializer>(norms: &Norms, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(norms.iter())
}

fn by_name_if_any<S: Serializer>(norms: &Option<Norms>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(norms.iter().flat_map(Norms::iter))
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn what_is_kept_is_bounded_and_evenly_spread() {
        let kept = |added: usize, most| {
            let mut spread = Spread::default();
            (0..added).for_each(|item| spread.add(item, most));
            spread.kept
        };
        assert_eq!(kept(4, 4), [0, 1, 2, 3]);
        assert_eq!(kept(5, 4), [0, 2, 4]);
        assert_eq!(kept(12, 4), [0, 4, 8]);
        assert_eq!(kept(1000, 1), [0]);
        assert_eq!(kept(100_000, 280).len(), 100_000_usize.div_ceil(512));
    }
}
