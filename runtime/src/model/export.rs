//! Whole parameters and gradients, for export and for tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use hsdp_comm::{PendingParts, Stage, Tag};
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
        let shard = whole_masters(site, unit, shard)?;
        gather_into(&mut parameters, context, tag, unit, shard)?;
    }
    end_together(site)?;
    Ok(parameters)
}

/// Ends a gather of whole tensors on all ranks, if replicas divide state. Gathers over the replicas
/// and over the shard group alternate in it. So a rank that makes it again needs all ranks, and
/// none may be ahead. Collective over the world.
///
/// # Errors
/// Errors of an all-gather.
pub(super) fn end_together(site: ErrorSite<'_>) -> Result<(), Error> {
    let ErrorSite { context, step, .. } = site;
    if !context.plan.divides_state() {
        return Ok(());
    }
    let tag = context.tag(None, Stage::Export, step, 0);
    context.control.exchange_in_step(tag, [0], |_| ())
}

/// Returns a unit's shard in f32, with the masters of all replicas: another handle to it, or a
/// copy. Collective over the replicas if these divide state: each has its slice alone for sure.
pub(crate) fn whole_masters(
    site: ErrorSite<'_>,
    unit: UnitId,
    shard: &Shard,
) -> Result<Arc<Vec<f32>>, Error> {
    let parameters = shard.in_f32(site)?;
    let plan = &site.context.plan;
    if !plan.divides_state() || !plan.spec()[unit].is_trainable() {
        return Ok(parameters);
    }
    let tag = site.context.tag(Some(unit), Stage::Export, site.step, 0);
    let parameters = Arc::unwrap_or_clone(parameters);
    Ok(Arc::new(gather_slices(site.context, tag, unit, parameters)?))
}

/// Gathers the slices of a unit over the replicas, on the host. Each rank has its own in `shard`.
pub(super) fn gather_slices(
    context: &Context,
    tag: Tag,
    unit: UnitId,
    shard: Vec<f32>,
) -> Result<Vec<f32>, Error> {
    let gathered = context.export_slices.gather_parts(tag, context.cuts(unit), shard.into());
    match gathered.and_then(PendingParts::wait) {
        Ok(HostBuffer::F32(shard)) => Ok(shard),
        Ok(_) => unreachable!("the buffer that was lent comes back"),
        Err(failed) => Err(failed.error.clone().into()),
    }
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
