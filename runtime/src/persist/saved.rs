//! The state of optimizers in a checkpoint, as an optimizer reads it.

use hsdp_checkpoint::{Generation, state_tensor};
use hsdp_sharding::{Param, ParamId, Role};

use crate::error::Error;
use crate::persist::fitting::{Fitting, Stateful};
use crate::persist::options::SavedOptions;
use crate::persist::problem::Problem;
use crate::state::context::Context;

/// The state of optimizers in a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct SavedState<'a> {
    pub(crate) context: &'a Context,
    pub(crate) generation: &'a Generation,
    /// Whose state it is.
    pub(crate) whose: Whose,
    /// The options that the optimizer takes.
    pub(crate) options: SavedOptions<'a>,
    /// Parts that fit, if only these are taken.
    pub(crate) fitting: Option<&'a Fitting>,
}

/// Optimizers that own the state in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// One optimizer updates all trainable parameters.
    One,
    /// Each parameter has the state of one of several optimizers.
    Several,
}

impl SavedState<'_> {
    /// Returns the same state for one optimizer of a pair: that of each parameter belongs to one of
    /// several.
    pub(crate) fn part(self, index: usize) -> Self {
        Self { whose: Whose::Several, options: self.options.part(index), ..self }
    }

    /// Returns the parameters that have such state which is [taken](Self::takes_state), in the order
    /// of the model: all trainable ones, if one optimizer updates them all, and there is any.
    #[must_use]
    pub fn parameters_with(&self, kinds: &[&str]) -> Vec<ParamId> {
        let tensors = &self.generation.manifest().tensors;
        let has = |id, name: &str| {
            let mut kinds = kinds.iter();
            self.takes_state(id)
                && kinds.any(|kind| tensors.contains_key(&state_tensor(kind, name)))
        };
        let (all, with): (Vec<_>, Vec<_>) =
            self.trainable().map(|(id, param)| (id, has(id, &param.name).then_some(id))).unzip();
        match self.whose {
            Whose::One if with.iter().any(Option::is_some) => all,
            _ => with.into_iter().flatten().collect(),
        }
    }

    /// Returns the parameters whose updates are counted, and [taken](Self::takes_state), and that
    /// have no state but averages, in the order of the model.
    #[must_use]
    pub fn counted_without_state(&self) -> Vec<ParamId> {
        let stateful = Stateful::of(self.generation.manifest());
        let without = self
            .trainable()
            .filter(|(id, param)| self.takes_state(*id) && stateful.only_counts(&param.name));
        without.map(|(id, _)| id).collect()
    }

    fn trainable(&self) -> impl Iterator<Item = (ParamId, &Param)> {
        let params = self.context.plan.spec().params();
        params.filter(|(_, param)| param.role == Role::Trainable)
    }

    /// A parameter of the model.
    ///
    /// # Panics
    /// If the model has no such parameter.
    #[must_use]
    pub fn parameter(&self, parameter: ParamId) -> &Param {
        &self.context.plan.spec()[parameter]
    }

    /// Returns whether the state of a parameter is taken. Otherwise it begins anew, where only what
    /// fits is taken
    /// ([`OtherParameters::TakeFitting`](crate::checkpoint::OtherParameters::TakeFitting)).
    #[must_use]
    pub fn takes_state(&self, parameter: ParamId) -> bool {
        self.fitting.is_none_or(|fitting| fitting.takes_state(parameter))
    }

    /// Returns whether the next update decides which optimizer gets the parameters without state. It
    /// does if only the part that fits is taken, and if the checkpoint was saved after such a load
    /// and before any update.
    pub(crate) fn is_open(&self) -> bool {
        let head = self.generation.manifest().optimizer.as_ref();
        self.fitting.is_some() || head.is_some_and(|head| head.is_open)
    }

    /// Reads elements of a parameter as it is after the load, which are `own` in the model before.
    pub(crate) fn read_parameter(
        &self,
        parameter: ParamId,
        start: usize,
        own: impl FnOnce(&mut [f32]) -> Result<(), Error>,
        into: &mut [f32],
    ) -> Result<(), Problem> {
        if self.fitting.is_some_and(|fitting| fitting.lacks(parameter)) {
            return Ok(own(into)?);
        }
        let name = &self.context.plan.spec()[parameter].name;
        Ok(self.generation.read(name, start as u64, into)?)
    }

    /// Returns the number of updates of a parameter; 0 if its state is not taken.
    #[must_use]
    pub fn updates(&self, parameter: ParamId) -> u64 {
        if !self.takes_state(parameter) {
            return 0;
        }
        let head = self.generation.manifest().optimizer.as_ref();
        let name = &self.context.plan.spec()[parameter].name;
        let counted = head.and_then(|head| head.updates.get(name));
        counted.copied().unwrap_or(0)
    }

    /// Reads elements of a tensor, from the `start`-th on, until `into` is full. Leaves `into` as
    /// it is if the state of the parameter is not [taken](Self::takes_state).
    ///
    /// # Errors
    /// If the checkpoint has no such tensor, or is damaged.
    pub fn read(
        &self,
        (kind, parameter): (&str, ParamId),
        start: usize,
        into: &mut [f32],
    ) -> Result<(), Problem> {
        if !self.takes_state(parameter) {
            return Ok(());
        }
        let name = state_tensor(kind, &self.context.plan.spec()[parameter].name);
        Ok(self.generation.read(&name, start as u64, into)?)
    }
}
