//! The differences between a checkpoint and a model with its optimizer.

use std::collections::BTreeSet;

use hsdp_checkpoint::{Generation, Manifest, OptimizerHead, STATE, state_tensor};
use hsdp_sharding::{Param, Role};

use super::together::Problem;
use super::{Checkpointed, Content};
use crate::engine::fabric::Fabric;

/// The parameters that a checkpoint has.
pub(super) fn content_of(manifest: &Manifest) -> Content {
    match manifest.frozen_digest {
        None => Content::All,
        Some(_) => Content::Trainable,
    }
}

/// Refuses a checkpoint of another model or optimizer, and one without frozen parameters where all are `wanted`.
pub(super) fn check<O: Checkpointed>(
    fabric: &Fabric,
    (generation, optimizer): (&Generation, &O),
    wanted: Content,
) -> Result<(), Problem> {
    let (manifest, path) = (generation.manifest(), generation.path().display());
    let refused = |what: String| Err(Problem::lasting(what));
    let wrong = differences(fabric, (manifest, optimizer));
    if !wrong.is_empty() {
        return refused(format!("{path} is of another model: {}", wrong.join("; ")));
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
    Ok(())
}

fn params(fabric: &Fabric) -> impl Iterator<Item = &Param> {
    fabric.plan.spec().units().iter().flat_map(|unit| &unit.params)
}

/// All differences between a checkpoint and this model and optimizer.
fn differences<O: Checkpointed>(
    fabric: &Fabric,
    (manifest, optimizer): (&Manifest, &O),
) -> Vec<String> {
    let mut wrong = Vec::new();
    match &manifest.optimizer {
        Some(OptimizerHead { kind, .. }) if kind == O::KIND => {}
        Some(OptimizerHead { kind, .. }) => {
            wrong.push(format!("its optimizer is {}, not {}", kind.escape_debug(), O::KIND));
            return wrong;
        }
        None => wrong.push("it has no optimizer".to_owned()),
    }
    let content = content_of(manifest);
    wrong.extend(missing_counts(fabric, (manifest, optimizer)));
    let mut expected = BTreeSet::new();
    for param in params(fabric).filter(|param| content.has(param.role)) {
        let kinds = if param.role == Role::Trainable { optimizer.state_kinds() } else { &[] };
        let states = kinds.iter().map(|kind| state_tensor(kind, &param.name));
        for name in [param.name.clone()].into_iter().chain(states) {
            let shape: Vec<u64> = param.shape.iter().map(|size| *size as u64).collect();
            match manifest.tensors.get(&name) {
                None => wrong.push(format!("`{name}` is missing")),
                Some(tensor) if tensor.shape != shape => {
                    wrong.push(format!("`{name}` has shape {:?}, not {shape:?}", tensor.shape));
                }
                Some(_) => {}
            }
            expected.insert(name);
        }
    }
    let left_over = manifest.tensors.keys().filter(|name| !expected.contains(*name));
    wrong.extend(left_over.map(|name| left_over_text(fabric, name)));
    wrong
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
fn missing_counts<O: Checkpointed>(
    fabric: &Fabric,
    (manifest, optimizer): (&Manifest, &O),
) -> Vec<String> {
    let Some(OptimizerHead { updates, .. }) = &manifest.optimizer else { return Vec::new() };
    let (spec, content) = (fabric.plan.spec(), content_of(manifest));
    let counted = spec.unit_ids().filter(|unit| !optimizer.updates(*unit).is_empty());
    let params = counted.flat_map(|unit| &spec[unit].params);
    let names = params.filter(|param| content.has(param.role)).map(|param| &param.name);
    let missing = names.filter(|name| !updates.contains_key(*name));
    missing.map(|name| format!("the number of updates of `{name}` is missing")).collect()
}
