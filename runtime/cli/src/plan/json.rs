//! Formats a plan as JSON.

use hsdp_sharding::{AfterForward, Flow, UnitId};
use serde_json::{Map, Value, json};

use super::Planned;
use super::memory::Place;
use super::traffic::World;

/// Returns the whole plan, with bytes and elements as exact numbers.
pub(super) fn of(planned: &Planned) -> Value {
    let Planned { name, optimizer, plan, memory, world } = planned;
    let options = plan.options();
    let places = memory.places.iter().map(|place| (place.name.to_owned(), place_json(place)));
    json!({
        "model": name,
        "mesh": [plan.mesh().replicate_size(), plan.mesh().shard_size()],
        "param_dtype": options.param_dtype.name(),
        "reduce_dtype": options.reduce_dtype.name(),
        "accumulation": options.accumulation.name(),
        "microbatches": world.microbatches,
        "prefetch": options.prefetch,
        "optimizer": optimizer.name(),
        "parameters": plan.spec().numel().get(),
        "fingerprint": format!("{:016x}", plan.fingerprint()),
        "units": plan.spec().unit_ids().map(|unit| unit_json(planned, unit)).collect::<Vec<_>>(),
        "memory": { "places": places.collect::<Map<_, _>>() },
        "traffic": {
            "worst_rank": world.busiest.get(),
            "ranks_as_busy": world.as_busy,
            "rank": flows_json(world, |flows| flows[0]),
            "all_ranks": flows_json(world, |flows| flows[1]),
        },
    })
}

fn unit_json(planned: &Planned, unit: UnitId) -> Value {
    let (spec, layout) = (&planned.plan.spec()[unit], planned.plan.layout(unit));
    json!({
        "name": spec.name,
        "parameters": spec.params.len(),
        "elements": spec.numel().get(),
        "trainable": spec.trainable_numel().get(),
        "shard": layout.shard_len(),
        "padding": layout.padding().get(),
        "keep": spec.after_forward == AfterForward::Keep,
        "compute_dtype": planned.plan.compute_dtype(unit).name(),
    })
}

fn place_json(place: &Place) -> Value {
    let mut peaks = Map::new();
    for category in place.categories() {
        let key = match category.name {
            "full" => format!("full_{}", category.when),
            name => name.to_owned(),
        };
        peaks.insert(key, category.bytes.get().into());
    }
    peaks.insert("full".to_owned(), place.peaks.full.get().into());
    peaks.insert("total".to_owned(), place.peaks.total().get().into());
    Value::Object(peaks)
}

/// Returns one of the two flows of each collective.
fn flows_json(world: &World, of: fn([Flow; 2]) -> Flow) -> Value {
    let flow = |flow: Flow| json!({ "calls": flow.calls, "bytes": flow.bytes.get() });
    let each = world.flows().into_iter().map(|(name, both)| (name.to_owned(), flow(of(both))));
    Value::Object(each.collect())
}
