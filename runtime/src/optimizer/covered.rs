//! The parameters that an optimizer updates, and the number of updates of each.

use std::collections::BTreeSet;

use hsdp_sharding::{ModelSpec, ParamId};

use crate::error::Error;
use crate::optimizer::places::{Packing, Places};
use crate::optimizer::updating::Updating;
use crate::persist::saved::SavedState;
use crate::state::context::Context;

/// The parameters that an optimizer updates.
#[derive(Clone, Debug)]
pub(super) struct Covered {
    pub(super) places: Places,
    /// Number of updates of each parameter, by unit and parameter. A step in which a parameter has
    /// no gradient does not count.
    updates: Vec<Vec<u64>>,
    cover: Cover,
}

/// The parameters that the next update may be of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Cover {
    /// The present ones and no others.
    Fixed,
    /// Any, if they include these, whose state a checkpoint had. It lacked the state of others, so
    /// the next update decides which optimizer gets them.
    Open { loaded: BTreeSet<ParamId> },
}

impl Covered {
    /// Returns the parameters that `has` selects, without any update.
    pub(super) fn of(context: &Context, has: impl Fn(ParamId) -> bool) -> Self {
        let places = Places::of(context, Packing::ELEMENTS, has);
        let units = context.plan.spec().units().iter();
        let updates = units.map(|unit| vec![0; unit.params.len()]).collect();
        Self { places, updates, cover: Cover::Fixed }
    }

    /// Checks that an optimizer of this kind, whose state is of these parameters, may update those
    /// of an update. Returns whether they are the same; if not, the state has to be made anew.
    ///
    /// # Errors
    /// [`Error::Options`] that names a parameter whose state would be lost, or which it may not
    /// update.
    pub(super) fn check(&self, kind: &str, updating: &Updating<'_>) -> Result<bool, Error> {
        let params = || updating.plan().spec().params();
        let differs = |id: ParamId| self.places.has(id) != updating.has(id);
        let is_refused = |id: ParamId| match &self.cover {
            Cover::Fixed => differs(id),
            Cover::Open { loaded } => loaded.contains(&id) && !updating.has(id),
        };
        match params().find(|(id, _)| is_refused(*id)) {
            None => Ok(!params().any(|(id, _)| differs(id))),
            Some((id, param)) => {
                let name = &param.name;
                let what = match self.places.has(id) {
                    true => format!(
                        "parameter `{name}`: {kind} has state of it, and {} updates it now; select \
                         it for {kind}",
                        updating.optimizer_of(id)
                    ),
                    false => format!(
                        "parameter `{name}`: {kind} has no state of it, because it did not update \
                         it in its first update"
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

    /// Counts an update, after which the parameters stay the same.
    pub(super) fn begin(&mut self, updating: &Updating<'_>) {
        self.cover = Cover::Fixed;
        for id in self.places.parameters().filter(|id| updating.updates(*id)) {
            self.updates[id.unit.index()][id.index] += 1;
        }
    }

    /// Returns whether the next update may be of further parameters.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.cover, Cover::Open { .. })
    }

    /// Returns whether a checkpoint had the state of a parameter, and no update has followed.
    pub(super) fn has_loaded(&self, parameter: ParamId) -> bool {
        matches!(&self.cover, Cover::Open { loaded } if loaded.contains(&parameter))
    }

    /// Returns the number of updates of a parameter.
    pub(super) fn count(&self, parameter: ParamId) -> u64 {
        self.updates[parameter.unit.index()][parameter.index]
    }

    /// The number of updates of each parameter, by name.
    pub(super) fn counts(&self, spec: &ModelSpec) -> impl Iterator<Item = (String, u64)> {
        self.parameters().map(|id| (spec[id].name.clone(), self.count(id)))
    }

    /// Takes the numbers of updates of the parameters that both have.
    pub(super) fn take_over(&mut self, earlier: &Self) {
        self.count_as(|id| earlier.count(id));
        self.cover = earlier.cover.clone();
    }

    /// Takes the numbers of updates in a checkpoint.
    pub(super) fn read(&mut self, saved: &SavedState<'_>) {
        self.count_as(|id| saved.updates(id));
        if saved.is_open() {
            let loaded = self.parameters().filter(|id| saved.takes_state(*id)).collect();
            self.cover = Cover::Open { loaded };
        }
    }

    fn count_as(&mut self, count: impl Fn(ParamId) -> u64) {
        for id in self.places.parameters() {
            self.updates[id.unit.index()][id.index] = count(id);
        }
    }
}
