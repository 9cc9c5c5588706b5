//! Collectives of ranks that share a memory.

use super::{Collective, Shape};
use crate::machine::{Machine, Threads};

/// The time of the passes over memory of a collective, in seconds.
///
/// Of `n` members with buffers of `s` bytes (docs/performance.md, "Collectives between threads"):
/// - all_gather: `s` read, `n s` written past the caches
/// - reduce_scatter: `n s` read, `s` written after its lines were read
/// - all_reduce and all_to_all: `n s` read, `n s` written
///
/// All groups that make it at the same time share the bandwidth.
pub(super) fn passes(machine: &Machine, shape: &Shape, collective: Collective, bytes: u64) -> f64 {
    let n = shape.members() as f64;
    let buffers = match collective {
        Collective::AllGather => 1.0 + n,
        Collective::ReduceScatter => n + 2.0,
        Collective::AllReduce | Collective::AllToAll => 2.0 * n,
    };
    let bandwidth = machine.memory.bandwidth.value() * machine.memory.efficiency.value();
    buffers * bytes as f64 * groups(machine, shape) / bandwidth
}

/// The time in which the members of a group meet, in seconds: if there are more ranks than cores, threads sleep while others run,
/// and a core has one after the other.
pub(super) fn meeting(machine: &Machine, host: &Threads, shape: &Shape) -> f64 {
    let ranks = shape.members() as f64 * groups(machine, shape);
    let turns = (ranks / machine.ranks.value()).ceil() - 1.0;
    machine.calls.start.value() + turns * host.switch.value()
}

/// Groups that share the memory: on cards each rank has its own.
fn groups(machine: &Machine, shape: &Shape) -> f64 {
    let shared =
        shape.parts().iter().map(|part| part.groups).max().filter(|_| machine.device().is_none());
    shared.unwrap_or(1) as f64
}
