//! The differences between a checkpoint and a model with its optimizer.

use std::collections::{BTreeMap, BTreeSet};

use hsdp_checkpoint::{Manifest, OptimizerHead, STATE, state_tensor};
use hsdp_sharding::{Param, ParamId, Role};

use super::together::Problem;
use super::{
    Checkpointed, Content, Expected, OtherOptions, SavedState, Spread, StateTensor, options,
};
use crate::engine::fabric::Fabric;

/// The parameters that a checkpoint has.
pub(super) fn content_of(manifest: &Manifest) -> Content {
    match manifest.frozen_digest {
        None => Content::All,
        Some(_) => Content::Trainable,
    }
}

/// Refuses a checkpoint of another model or optimizer, and one without frozen parameters where all are `wanted`. Returns the state with
/// the options that the optimizer takes.
pub(super) fn check<'a, O: Checkpointed>(
    saved: SavedState<'a>,
    optimizer: &O,
    wanted: Content,
    others: OtherOptions,
) -> Result<SavedState<'a>, Problem> {
    let SavedState { fabric, generation, .. } = saved;
    let (manifest, path) = (generation.manifest(), generation.path().display());
    let refused = |what: String| Err(Problem::lasting(what));
    let options = options::agreed(manifest, &optimizer.head(fabric.plan.spec()), others);
    let saved = SavedState { options: options.clone().unwrap_or(saved.options), ..saved };
    let wrong = differences(&saved, optimizer);
    match (wrong.is_empty(), options) {
        (true, Ok(_)) => {}
        (true, Err(others)) => return refused(format!("{path}: {others}")),
        (false, others) => {
            let others = others.err().map_or_else(String::new, |others| format!("; {others}"));
            return refused(format!("{path} is of another model: {}{others}", wrong.join("; ")));
        }
    }
    let frozen = params(fabric).filter(|param| param.role == Role::Frozen);
    let frozen: Vec<_> = frozen.map(|param| format!("`{}`", param.name)).collect();
    let lacks = (content_of(manifest), wanted) == (Content::Trainable, Content::All);
    if lacks && !frozen.is_empty() {
        let what = format!(
            "{path} has the trainable parameters alone, and lacks the frozen ones: {}; give the model its frozen parameters, and open its \
             checkpoints with Content::Trainable",
            frozen.join(", ")
        );
        return refused(what);
    }
    Ok(saved)
}

fn params(fabric: &Fabric) -> impl Iterator<Item = &Param> {
    fabric.plan.spec().units().iter().flat_map(|unit| &unit.params)
}

/// All differences between a checkpoint and this model and optimizer.
fn differences<O: Checkpointed>(saved: &SavedState<'_>, optimizer: &O) -> Vec<String> {
    let (fabric, manifest) = (saved.fabric, saved.generation.manifest());
    let own = optimizer.head(fabric.plan.spec()).kind;
    let mut wrong = Vec::new();
    match &manifest.optimizer {
        Some(OptimizerHead { kind, .. }) if *kind == own => {}
        Some(OptimizerHead { kind, .. }) => {
            wrong.push(format!("its optimizer is {}, not {own}", kind.escape_debug()));
            return wrong;
        }
        None => wrong.push("it has no optimizer".to_owned()),
    }
    let Expected { tensors, counted } = optimizer.expected(saved);
    wrong.extend(missing_counts(saved, &counted));
    let mut expected = BTreeSet::new();
    for (name, shape) in named(fabric, content_of(manifest), &tensors) {
        match manifest.tensors.get(&name) {
            None => wrong.push(format!("`{name}` is missing")),
            Some(tensor) if tensor.shape != shape => {
                wrong.push(format!("`{name}` has shape {:?}, not {shape:?}", tensor.shape));
            }
            Some(_) => {}
        }
        expected.insert(name);
    }
    let left_over = manifest.tensors.keys().filter(|name| !expected.contains(*name));
    wrong.extend(left_over.map(|name| left_over_text(fabric, name)));
    wrong
}

/// The names and shapes of the tensors that a checkpoint should have: those of each parameter, one after the other.
fn named(fabric: &Fabric, content: Content, tensors: &[StateTensor]) -> Vec<(String, Vec<u64>)> {
    let mut of_parameter = BTreeMap::<ParamId, Vec<&StateTensor>>::new();
    for tensor in tensors {
        of_parameter.entry(tensor.parameter).or_default().push(tensor);
    }
    let params = fabric.plan.spec().params().filter(|(_, param)| content.has(param.role));
    let named = params.flat_map(|(id, param)| {
        let states = of_parameter.get(&id).into_iter().flatten();
        let states = states.map(|it| (state_tensor(it.kind, &param.name), it.spread.shape(param)));
        [(param.name.clone(), Spread::Elements.shape(param))].into_iter().chain(states)
    });
    named.collect()
}

/// The text of a tensor that the model does not read.
fn left_over_text(fabric: &Fabric, name: &str) -> String {
    let shown = name.escape_debug();
    if params(fabric).any(|param| param.name == name) {
        return format!("`{shown}` is trainable there, and frozen in this model");
    }
    let what = if name.starts_with(STATE) { "state" } else { "a parameter" };
    format!("`{shown}` is {what} that this model does not have")
}

/// The parameters whose updates the optimizer counts and the checkpoint does not, one text for each.
fn missing_counts(saved: &SavedState<'_>, counted: &[ParamId]) -> Vec<String> {
    let manifest = saved.generation.manifest();
    let Some(OptimizerHead { updates, .. }) = &manifest.optimizer else { return Vec::new() };
    let names = counted.iter().map(|id| &saved.fabric.plan.spec()[*id].name);
    let missing = names.filter(|name| !updates.contains_key(*name));
    missing.map(|name| format!("the number of updates of `{name}` is missing")).collect()
}
