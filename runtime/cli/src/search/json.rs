//! The result of a search as JSON.

use hsdp_simulator::Found;
use serde_json::{Map, Value, json};

use super::Searched;

/// The whole result. Times are in seconds.
pub(super) fn of(searched: &Searched<'_>) -> Value {
    let Searched { options, machine, memory, search } = searched;
    let unfit = search.unfit.iter().map(|(unfit, count)| (unfit.to_string(), (*count).into()));
    let cells = search.cells.iter().map(|((replicas, shards, microbatches), speed)| {
        json!({ "mesh": [replicas, shards], "microbatches": microbatches, "tokens_per_second": speed })
    });
    json!({
        "model": options.model,
        "machine": machine.name,
        "ranks": options.ranks,
        "memory": memory.get(),
        "candidates": search.candidates,
        "simulated": search.simulated,
        "unfit": unfit.collect::<Map<_, _>>(),
        "best": search.best.iter().map(found).collect::<Vec<_>>(),
        "meshes": cells.collect::<Vec<_>>(),
    })
}

fn found(found: &Found) -> Value {
    let Found { candidate, prediction, .. } = found;
    json!({
        "options": candidate.to_string(),
        "tokens_per_second": prediction.tokens_per_second(),
        "seconds": prediction.timing.step.seconds(),
        "flops_utilisation": prediction.flops_utilisation(),
        "memory": prediction.memory.total().get(),
    })
}
