//! Whole parameters and gradients, for export and for tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use hsdp_comm::{Stage, Tag};
use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::{DType, UnitId};

use crate::error::Error;
use crate::state::context::{Context, ErrorSite};
use crate::state::shard::Shard;

/// Returns all parameters in f32, by name.
pub(crate) fn full_parameters(
    site: ErrorSite<'_>,
    shards: &[Shard],
) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let ErrorSite { context, step, .. } = site;
    let mut parameters = BTreeMap::new();
    for (unit, shard) in shards.iter().enumerate() {
        let unit = UnitId::new(unit);
        let tag = context.tag(Some(unit), Stage::Export, step, 0);
        gather_into(&mut parameters, context, tag, unit, shard.in_f32(site)?)?;
    }
    Ok(parameters)
}

/// Gathers the parameters of a unit, and adds them to `all` by name.
pub(super) fn gather_into(
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
