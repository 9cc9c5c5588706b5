//! The parts of a checkpoint that fit a model, and the state that a checkpoint has.

use std::collections::BTreeSet;

use hsdp_checkpoint::{Manifest, OptimizerHead, STATE};
use hsdp_sharding::ParamId;

use crate::persist::tensors::AVERAGE;

/// Parts of a checkpoint that fit a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fitting {
    /// Parameters whose state is taken.
    pub(crate) states: BTreeSet<ParamId>,
    /// Parameters without a fitting value in the checkpoint.
    pub(crate) lacking: BTreeSet<ParamId>,
    pub(crate) lists: Unmatched,
}

/// The names of parameters and tensors that do not fit, and the text of settings that differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unmatched {
    pub(crate) new_parameters: Vec<String>,
    pub(crate) new_states: Vec<String>,
    pub(crate) left_over: Vec<String>,
    pub(crate) other_settings: Vec<String>,
}

impl Fitting {
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
        let with_state = states.filter(|(kind, _)| *kind != AVERAGE).map(|it| it.1).collect();
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
