//! The parameters that an optimizer updates, and the number of updates of each.

use hsdp_sharding::{ModelSpec, ParamId};

use crate::checkpoint::Source;
use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::optimizer::Updating;
use crate::optimizer::places::{Packing, Places};

/// The parameters that an optimizer updates.
#[derive(Clone, Debug)]
pub(super) struct Covered {
    pub(super) places: Places,
    /// By unit and parameter: the number of its updates. A step in which a parameter has no gradient is not one of them.
    updates: Vec<Vec<u64>>,
}

impl Covered {
    /// The parameters that `has` selects, none of which was updated.
    pub(super) fn of(fabric: &Fabric, has: impl Fn(ParamId) -> bool) -> Self {
        let places = Places::of(fabric, Packing::ELEMENTS, has);
        let units = fabric.plan.spec().units().iter();
        Self { places, updates: units.map(|unit| vec![0; unit.params.len()]).collect() }
    }

    /// Checks that an optimizer of this kind updates these parameters and no others.
    ///
    /// # Errors
    /// [`Error::Options`] that names another one.
    pub(super) fn check(&self, kind: &str, updating: &Updating<'_>) -> Result<(), Error> {
        let mut params = updating.plan().spec().params();
        let differs = |id: ParamId| self.places.has(id) != updating.has(id);
        match params.find(|(id, _)| differs(*id)) {
            None => Ok(()),
            Some((id, param)) => {
                let name = &param.name;
                let what = match self.places.has(id) {
                    true => format!(
                        "parameter `{name}`: {kind} has state of it, and does not update it now"
                    ),
                    false => format!(
                        "parameter `{name}`: {kind} has no state of it, because it did not update it in its first update"
                    ),
                };
                Err(Error::Options { what })
            }
        }
    }

    /// The parameters, in the order of the model.
    pub(super) fn parameters(&self) -> impl Iterator<Item = ParamId> {
        self.places.parameters()
    }

    /// Counts an update.
    pub(super) fn begin(&mut self, updating: &Updating<'_>) {
        for id in self.places.parameters().filter(|id| updating.updates(*id)) {
            self.updates[id.unit.index()][id.index] += 1;
        }
    }

    /// The number of updates of a parameter.
    pub(super) fn count(&self, parameter: ParamId) -> u64 {
        self.updates[parameter.unit.index()][parameter.index]
    }

    /// The number of updates of each parameter, by name.
    pub(super) fn counts(&self, spec: &ModelSpec) -> impl Iterator<Item = (String, u64)> {
        self.parameters().map(|id| (spec[id].name.clone(), self.count(id)))
    }

    /// Takes the numbers of updates of the parameters that both have.
    pub(super) fn take_over(&mut self, earlier: &Self) {
        for id in self.places.parameters() {
            self.updates[id.unit.index()][id.index] = earlier.count(id);
        }
    }

    /// Takes the numbers of updates in a checkpoint, or of earlier state.
    pub(super) fn read(&mut self, saved: &dyn Source) {
        for id in self.places.parameters() {
            self.updates[id.unit.index()][id.index] = saved.updates(id);
        }
    }
}
