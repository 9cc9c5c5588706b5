//! Whole parameters and gradients, for export and for tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use hsdp_comm::{Part, PartKind, Stage, Tag};
use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::{DType, Role, UnitId};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::shard::Shard;
use crate::step::gradients::Gradients;

/// Returns all parameters in f32, by name.
pub(crate) fn full_parameters(
    context: &Context,
    shards: &[Shard],
    step: u64,
) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let mut parameters = BTreeMap::new();
    for (unit, shard) in shards.iter().enumerate() {
        let unit = UnitId::new(unit);
        let tag = context.tag(Some(unit), Stage::Export, step, 0);
        gather_into(&mut parameters, context, tag, unit, shard.in_f32(context)?)?;
    }
    Ok(parameters)
}

/// Returns the gradients of all trainable parameters in f32, by name.
pub(crate) fn full_gradients(
    context: &Context,
    gradients: &Gradients,
) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let mut all = BTreeMap::new();
    for unit in context.plan.reductions().iter().copied() {
        // Frozen parameters have no gradient: their region of the shard is filled with zeros.
        let mut shard = gradients.shard_in(context, unit)?;
        shard.resize(context.plan.layout(unit).shard_len(), 0.0);
        let tag = context.tag(Some(unit), Stage::Export, gradients.step, 0);
        let tag = tag.part(Part { kind: PartKind::Gradients, number: 0 });
        gather_into(&mut all, context, tag, unit, Arc::new(shard))?;
    }
    let parameters = context.plan.spec().units().iter().flat_map(|unit| &unit.params);
    for frozen in parameters.filter(|parameter| parameter.role == Role::Frozen) {
        all.remove(&frozen.name);
    }
    Ok(all)
}

fn gather_into(
    all: &mut BTreeMap<String, Vec<f32>>,
    context: &Context,
    tag: Tag,
    unit: UnitId,
    shard: Arc<Vec<f32>>,
) -> Result<(), Error> {
    let layout = context.plan.layout(unit);
    let zeros = layout.params().iter().map(|slot| HostBuffer::zeros(DType::F32, slot.len));
    let targets = zeros.collect::<Result<Vec<_>, _>>()?;
    let full = context.export.gather_unit(tag, Arc::clone(layout), shard, targets)?.wait()?;
    for (parameter, buffer) in context.plan.spec()[unit].params.iter().zip(full) {
        if let Values::F32(values) = buffer.values() {
            all.insert(parameter.name.clone(), values.to_vec());
        }
    }
    Ok(())
}
