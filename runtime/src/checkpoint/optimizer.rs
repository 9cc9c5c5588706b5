//! The optimizers whose state a checkpoint can keep.

use std::collections::BTreeSet;

use hsdp_checkpoint::OptimizerHead;
use hsdp_sharding::{Param, ParamId, Role};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::checkpointed::{AND, Checkpointed, ONE_OF_EACH_KIND};
use crate::state::control;

/// Refuses a call that does not fit the model's state. The other ranks get the reason.
///
/// # Errors
/// [`Error::Misuse`] within a step, while its gradients exist, inside
/// [`ShardedModel::with_shards`], or if the optimizer was made for another model, or consists of
/// two of one kind.
pub(super) fn check<O: Checkpointed>(
    model: &ShardedModel,
    optimizer: &O,
    operation: &'static str,
) -> Result<(), Error> {
    control::between_steps(model.world(), model.committed_steps(), || {
        model.check_between_steps(operation)?;
        check_optimizer(model, optimizer, operation)
    })
}

/// Checks that a checkpoint can tell the tensors of optimizers apart, and has the state of all
/// trainable parameters.
///
/// # Errors
/// [`Error::Misuse`].
fn check_optimizer<O: Checkpointed>(
    model: &ShardedModel,
    optimizer: &O,
    operation: &'static str,
) -> Result<(), Error> {
    let problem = if optimizer.is_of(model.id()) {
        let all = [twice(model, optimizer), unclear(optimizer), partial(model, optimizer)];
        all.into_iter().flatten().next()
    } else {
        Some("the optimizer was made for another model".to_owned())
    };
    let refuse = |what| Err(model.engine.context.misuse(operation, model.committed_steps(), what));
    problem.map_or(Ok(()), refuse)
}

fn twice<O: Checkpointed>(model: &ShardedModel, optimizer: &O) -> Option<String> {
    let kind = optimizer.head(model.plan().spec()).kind;
    let mut kinds = BTreeSet::new();
    let twice = kind.split(AND).find(|kind| !kinds.insert(*kind))?;
    Some(format!("two optimizers are {twice}: {ONE_OF_EACH_KIND}"))
}

fn unclear<O: Checkpointed>(optimizer: &O) -> Option<String> {
    let is_name = |kind: &str| kind.chars().all(|it| it.is_ascii_alphanumeric() || it == '_');
    let mut kinds = BTreeSet::new();
    let mut all = optimizer.kinds().into_iter();
    let unclear = all.find(|kind| !is_name(kind) || !kinds.insert(*kind))?;
    Some(format!(
        "state of kind `{}`: a checkpoint needs a name of letters, digits and `_` that no other \
         optimizer of the update has",
        unclear.escape_debug()
    ))
}

/// One optimizer has updated all trainable parameters, or has no state. Several may each have
/// updated some. A parameter that is updated need not have state.
fn partial<O: Checkpointed>(model: &ShardedModel, optimizer: &O) -> Option<String> {
    let spec = model.plan().spec();
    let OptimizerHead { kind, updates, .. } = optimizer.head(spec);
    let state: BTreeSet<ParamId> = optimizer.tensors().iter().map(|it| it.parameter).collect();
    let is_known = |id, param: &Param| state.contains(&id) || updates.contains_key(&param.name);
    let all = || spec.params().filter(|(_, param)| param.role == Role::Trainable);
    let (trainable, updated) =
        (all().count(), all().filter(|(id, param)| is_known(*id, param)).count());
    if kind.contains(AND) || state.is_empty() || updated == trainable {
        return None;
    }
    Some(format!(
        "{kind} has updated {updated} of {trainable} trainable parameters: a checkpoint needs all \
         optimizers of the update, as a pair"
    ))
}
