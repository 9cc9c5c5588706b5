//! The state of optimizers in a checkpoint, as an optimizer reads it: its options, and the parts
//! that fit a model.

use std::collections::BTreeSet;

use hsdp_checkpoint::{Generation, Manifest, OptimizerHead, STATE, state_tensor};
use hsdp_sharding::{BufferId, Param, ParamId, Role};
use serde_json::Value;

use crate::error::Error;
use crate::model::updates::Average;
use crate::persist::problem::Problem;
use crate::state::context::{Context, ErrorSite};

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
    pub(crate) fitting: Option<&'a FittingParts>,
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

    /// Returns the parameters that have such state which is [taken](Self::takes_state), in the
    /// order of the model: all trainable ones, if one optimizer updates them all, and there is any.
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

    /// Returns the load, for the errors that name it.
    pub(crate) fn site(&self) -> ErrorSite<'_> {
        self.context.site("loading", self.generation.manifest().step)
    }

    fn trainable(&self) -> impl Iterator<Item = (ParamId, &Param)> {
        let params = self.context.plan.spec().params();
        params.filter(|(_, param)| param.role == Role::Trainable)
    }

    /// Returns a parameter of the model.
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

    /// Returns whether the next update decides which optimizer gets the parameters without state.
    /// It does if only the part that fits is taken, and if the checkpoint was saved after such a
    /// load and before any update.
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

    /// Returns whether the state of a buffer is taken. Otherwise it begins anew, where only what
    /// fits is taken
    /// ([`OtherParameters::TakeFitting`](crate::checkpoint::OtherParameters::TakeFitting)).
    #[must_use]
    pub fn takes_buffer_state(&self, buffer: BufferId) -> bool {
        self.fitting.is_none_or(|fitting| fitting.buffer_states.contains(&buffer))
    }

    /// Reads a buffer as it is after the load; `own` fills in the model's values from before.
    pub(crate) fn read_buffer(
        &self,
        buffer: BufferId,
        own: impl FnOnce(&mut [f32]),
        into: &mut [f32],
    ) -> Result<(), Problem> {
        if self.fitting.is_some_and(|fitting| fitting.lacking_buffers.contains(&buffer)) {
            own(into);
            return Ok(());
        }
        Ok(self.generation.read(&self.context.plan.spec()[buffer].name, 0, into)?)
    }

    /// Reads the values that an optimizer kept of a buffer. Leaves `into` as it is if the state of
    /// the buffer is not [taken](Self::takes_buffer_state).
    ///
    /// # Errors
    /// If the checkpoint has no such tensor, or is damaged.
    pub fn read_buffer_state(
        &self,
        kind: &str,
        buffer: BufferId,
        into: &mut [f32],
    ) -> Result<(), Problem> {
        if !self.takes_buffer_state(buffer) {
            return Ok(());
        }
        let name = state_tensor(kind, &self.context.plan.spec()[buffer].name);
        Ok(self.generation.read(&name, 0, into)?)
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
        kind: &str,
        parameter: ParamId,
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

/// Parts of a checkpoint that fit a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FittingParts {
    /// Parameters whose state is taken.
    pub(crate) states: BTreeSet<ParamId>,
    /// Parameters without a fitting value in the checkpoint.
    pub(crate) lacking: BTreeSet<ParamId>,
    /// Buffers whose state is taken.
    pub(crate) buffer_states: BTreeSet<BufferId>,
    /// Buffers without a fitting value in the checkpoint.
    pub(crate) lacking_buffers: BTreeSet<BufferId>,
    pub(crate) lists: Unmatched,
}

/// The names of parameters, buffers and tensors that do not fit, and the text of settings that
/// differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unmatched {
    pub(crate) new_parameters: Vec<String>,
    pub(crate) new_buffers: Vec<String>,
    pub(crate) new_states: Vec<String>,
    pub(crate) new_buffer_states: Vec<String>,
    pub(crate) left_over: Vec<String>,
    pub(crate) other_settings: Vec<String>,
}

impl FittingParts {
    /// Returns whether the state of a parameter is taken.
    pub(crate) fn takes_state(&self, parameter: ParamId) -> bool {
        self.states.contains(&parameter)
    }

    /// Returns whether the checkpoint lacks values of a parameter.
    pub(crate) fn lacks(&self, parameter: ParamId) -> bool {
        self.lacking.contains(&parameter)
    }
}

/// The parameters of a checkpoint that optimizers have updated, besides averages.
pub(crate) struct Stateful<'a> {
    with_state: BTreeSet<&'a str>,
    pub(crate) counted: BTreeSet<&'a str>,
}

impl<'a> Stateful<'a> {
    pub(crate) fn of(manifest: &'a Manifest) -> Self {
        let states = manifest.tensors.keys();
        let states = states.filter_map(|name| name.strip_prefix(STATE)?.split_once(':'));
        let with_state = states.filter(|(kind, _)| *kind != Average::KIND).map(|it| it.1).collect();
        let updates = |head: &'a OptimizerHead| head.updates.keys().map(|name| &**name);
        let counted = manifest.optimizer.iter().flat_map(updates).collect();
        Self { with_state, counted }
    }

    pub(crate) fn any(&self) -> bool {
        !self.with_state.is_empty() || !self.counted.is_empty()
    }

    /// Returns whether there is state of other parameters, and none of this one.
    pub(crate) fn lacks(&self, name: &str) -> bool {
        self.any() && !self.with_state.contains(name) && !self.counted.contains(name)
    }

    /// Returns whether the updates of a parameter are counted, and there is no state of it.
    pub(crate) fn only_counts(&self, name: &str) -> bool {
        self.counted.contains(name) && !self.with_state.contains(name)
    }
}

/// Name of the learning rate in a checkpoint, whatever an optimizer calls it.
pub(crate) const RATE: &str = "learning_rate";

/// The options in a checkpoint that an optimizer takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SavedOptions<'a> {
    /// The optimizer's own options.
    Own,
    /// The learning rates. All other options are equal.
    Rates { now: &'a Value },
    /// All options.
    All { now: &'a Value, made_with: &'a Value },
}

impl SavedOptions<'_> {
    /// Returns those of one optimizer of a pair.
    pub(crate) fn part(self, index: usize) -> Self {
        match self {
            Self::Own => Self::Own,
            Self::Rates { now } => Self::Rates { now: &now[index] },
            Self::All { now, made_with } => {
                Self::All { now: &now[index], made_with: &made_with[index] }
            }
        }
    }
}
