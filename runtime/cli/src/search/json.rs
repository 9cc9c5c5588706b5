//! Formats the result of a search as JSON.

use hsdp_simulator::Found;
use serde_json::{Map, Value, json};

use super::Searched;
use super::report::distance;

/// Returns the whole result. Times are in seconds.
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
        "batch_tokens": options.batch_tokens.number(),
        "candidates": search.candidates,
        "simulated": search.simulated,
        "over_budget": search.over_budget,
        "error": search.error.relative,
        "fastest": search.fastest,
        "unfit": unfit.collect::<Map<_, _>>(),
        "best": search.best.iter().map(|it| found(searched, it)).collect::<Vec<_>>(),
        "meshes": cells.collect::<Vec<_>>(),
    })
}

fn found(searched: &Searched<'_>, found: &Found) -> Value {
    let prediction = &found.prediction;
    json!({
        "ties": found.band == 0,
        "behind": distance(found, searched.search.fastest),
        "options": searched.options_of(found),
        "tokens_per_second": prediction.tokens_per_second(),
        "tokens": prediction.tokens,
        "seconds": prediction.timing.step.seconds(),
        "flops_utilisation": prediction.flops_utilisation(),
        "memory": prediction.memory.total().get(),
        "memory_on_host": prediction.memory.offloaded.total().get(),
    })
}
