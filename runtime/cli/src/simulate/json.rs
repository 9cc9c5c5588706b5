//! Formats a simulated step as JSON.

use hsdp_simulator::{Level, Share};
use serde_json::{Map, Value, json};

use super::Simulated;
use crate::machine::memory_of;

/// Returns the whole prediction. Times are in seconds.
pub(super) fn of(simulated: &Simulated<'_>) -> Value {
    let Simulated { choices, machine, workload, prediction, .. } = simulated;
    let ranks = prediction.timing.ranks.iter().enumerate().map(|(color, rank)| {
        let share =
            |share: Share| (share.name().to_owned(), rank.shares.of(share).seconds().into());
        json!({
            "first": rank.first.get(),
            "count": rank.count,
            "seconds": rank.step.seconds(),
            "shares": Share::ALL.map(share).into_iter().collect::<Map<_, _>>(),
            "links": {
                "machine": prediction.link_utilisation(color, Level::Machine),
                "network": prediction.link_utilisation(color, Level::Network),
            },
        })
    });
    let memory = &prediction.memory;
    let parts = memory.parts().map(|(name, bytes)| (name.to_owned(), bytes.get().into()));
    json!({
        "model": choices.model,
        "machine": machine.name,
        "mesh": [workload.plan.mesh().replicate_size(), workload.plan.mesh().shard_size()],
        "seconds": prediction.timing.step.seconds(),
        "tokens": prediction.tokens,
        "tokens_per_second": prediction.tokens_per_second(),
        "flops": prediction.flops,
        "flops_utilisation": prediction.flops_utilisation(),
        "ranks": ranks.collect::<Vec<_>>(),
        "memory": {
            "total": memory.total().get(),
            "capacity": memory_of(machine, workload.plan.mesh().world_size()).get(),
            "parts": parts.into_iter().collect::<Map<_, _>>(),
            "on_host": memory.offloaded.total().get(),
        },
    })
}
