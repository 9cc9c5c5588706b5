//! Loads of a checkpoint whose parameters are not those of the model: the part that fits is taken,
//! and the rest is listed.

use std::collections::{BTreeMap, BTreeSet};

use hsdp_checkpoint::{Manifest, listed, state_tensor};
use hsdp_sharding::{Param, ParamId, Role};

use super::stated;
use crate::persist::checkpointed::{Expected, StateTensor};
use crate::persist::saved::{FittingParts, SavedState, Stateful, Unmatched};

impl FittingParts {
    /// Compares a checkpoint with the model and the tensors and counts that an optimizer expects.
    pub(super) fn of(saved: &SavedState<'_>, expected: &Expected) -> Self {
        let (spec, manifest) = (saved.context.plan.spec(), saved.generation.manifest());
        let mut of_parameter = BTreeMap::<ParamId, Vec<&StateTensor>>::new();
        for tensor in &expected.tensors {
            of_parameter.entry(tensor.parameter).or_default().push(tensor);
        }
        let stateful = Stateful::of(manifest);
        let (mut fitting, mut used) = (Self::default(), BTreeSet::new());
        for (id, param) in spec.params() {
            let has_value = has_value(manifest, param);
            if has_value {
                used.insert(param.name.clone());
            } else {
                fitting.lacking.insert(id);
                // The digest of the frozen parameters stands for those that the files leave out.
                let is_base = param.role == Role::Frozen
                    && manifest.frozen_digest.is_some()
                    && !manifest.tensors.contains_key(&param.name);
                if !is_base {
                    fitting.lists.new_parameters.push(param.name.clone());
                }
            }
            if param.role == Role::Frozen {
                continue;
            }
            let states = of_parameter.get(&id).into_iter().flatten();
            let states: Vec<(String, Vec<u64>)> = states
                .map(|it| (state_tensor(it.kind, &param.name), it.spread.shape(param)))
                .collect();
            let is_there = |(name, shape): &(String, Vec<u64>)| {
                manifest.tensors.get(name).is_some_and(|tensor| tensor.shape == *shape)
            };
            let is_counted = || stateful.counted.contains(&*param.name);
            let is_whole = has_value
                && states.iter().all(is_there)
                && (!expected.counted.contains(&id) || is_counted());
            if is_whole {
                fitting.states.insert(id);
                used.extend(states.into_iter().map(|(name, _)| name));
            }
            if !is_whole && stateful.any() || stateful.lacks(&param.name) {
                fitting.lists.new_states.push(param.name.clone());
            }
        }
        let left_over = manifest.tensors.keys().filter(|name| !used.contains(*name));
        fitting.lists.left_over = left_over.cloned().collect();
        fitting.lists.other_settings = stated::other_settings(saved.context, manifest);
        fitting
    }
}

/// Returns whether a checkpoint has values of a parameter, with its shape.
fn has_value(manifest: &Manifest, param: &Param) -> bool {
    let shape = param.shape.iter().map(|size| *size as u64);
    manifest.tensors.get(&param.name).is_some_and(|tensor| shape.eq(tensor.shape.iter().copied()))
}

impl Unmatched {
    /// Returns a text for a warning, if something does not fit. It names the first few tensors of
    /// each list.
    pub(super) fn text(&self) -> Option<String> {
        let Self { new_parameters, new_states, left_over, other_settings } = self;
        let lists = [
            ("parameters that keep the values of the model", new_parameters),
            ("parameters whose optimizer state begins anew", new_states),
            ("tensors of the checkpoint that are left over", left_over),
        ];
        let lists = lists.into_iter().filter(|(_, names)| !names.is_empty());
        let text = |(what, names): (&str, &Vec<String>)| {
            let names: Vec<String> = names.iter().map(|it| it.escape_debug().to_string()).collect();
            format!("{what}: {}", listed(&names, ", "))
        };
        let texts: Vec<String> = other_settings.iter().cloned().chain(lists.map(text)).collect();
        (!texts.is_empty()).then(|| {
            format!(
                "the checkpoint is of another model, of which this one takes what fits; {}",
                texts.join("; ")
            )
        })
    }
}
