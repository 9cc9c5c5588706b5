//! The times of collectives, by the shape of a group.
//!
//! On cards, the algorithms are NCCL's ring and double binary tree with its three protocols, with
//! the constants by which NCCL itself chooses among them (`src/graph/tuning.cc` of NCCL 2.30, in
//! the functions `ncclTopoTuneModel` and `ncclTopoGetAlgoTime`). On a host, a collective is passes
//! over memory (docs/performance.md, "Collectives between threads").

mod cards;
mod shape;

#[cfg(test)]
mod tests;

pub use self::shape::{Shape, Shapes};

use crate::Time;
use crate::machine::{Machine, MachineKind, Threads};

/// A collective whose time can be predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Every member gets the elements of all members.
    AllGather,
    /// Every member gets the parts of all others, in a buffer that has its own part already. On
    /// cards, parts are padded, in buffers of their own.
    AllGatherParts,
    /// Member `i` gets the sum of the `i`-th parts of all members.
    ReduceScatter,
    /// The same, in the place of its own part. On cards, parts are padded, in buffers of their own.
    ReduceScatterParts,
    /// Every member gets the sum of the elements of all members.
    AllReduce,
}

/// The time of a collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectiveCost {
    /// From the moment at which its last member is ready to its end on all members.
    pub time: Time,
    /// The part of it in which a member's links carry bytes, by [`Level`](crate::Level). On a host,
    /// the level of the machine is its memory.
    pub busy: [Time; 2],
}

/// Returns the cost of a collective of a group of this shape. All groups of the axis make it at the
/// same time.
///
/// `bytes` are those of the larger of a member's two buffers: all parts of an all_gather, the
/// contribution of a reduce_scatter. On cards, a call of no bytes takes no time, since NCCL leaves
/// it out. A group of one member copies its buffer, unless it gathers parts.
///
/// ```
/// use hsdp_simulator::{CollectiveKind, Machine, Shapes, collective_cost};
/// let node = Machine::bundled("a100-node")?;
/// let world = Shapes::new("1x8".parse()?, &node)?.world();
/// let cost = collective_cost(&node, &world, CollectiveKind::AllReduce, 1 << 30);
/// assert!(cost.time.seconds() > 7e-3 && cost.time.seconds() < 9e-3, "{}", cost.time);
/// # Ok::<(), hsdp_simulator::Error>(())
/// ```
#[must_use]
pub fn collective_cost(
    machine: &Machine,
    shape: &Shape,
    collective: CollectiveKind,
    bytes: u64,
) -> CollectiveCost {
    let in_memory =
        |idle| Cost { idle, carrying: [memory_passes(machine, shape, collective, bytes), 0.0] };
    let cost = match &machine.kind {
        _ if shape.members() == 1 => in_memory(0.0),
        MachineKind::Host(host) => in_memory(meeting(machine, host, shape)),
        MachineKind::Device(_) if bytes == 0 => Cost::default(),
        MachineKind::Device(device) => {
            let cost = cards::Route::new(machine, device, shape).cost(collective, bytes);
            Cost { idle: cost.idle + machine.calls.start.value(), ..cost }
        }
    };
    CollectiveCost {
        time: Time::saturating(cost.seconds()),
        busy: cost.carrying.map(Time::saturating),
    }
}

/// The ranks that send to one in the tree of an exchange (`comm/REMOTE.md`, "Exchanges").
const CHILDREN: usize = 32;

/// Returns the time of an exchange of all ranks on the control channel, of which `world` is the
/// shape: a header or an agreement of a step, whose few bytes take no time.
///
/// On a host it is a meeting of threads. Ranks with cards are processes: messages go up a tree, and
/// down again.
#[must_use]
pub(crate) fn exchange_time(machine: &Machine, world: &Shape) -> Time {
    match &machine.kind {
        _ if world.members() == 1 => Time::ZERO,
        MachineKind::Host(host) => Time::saturating(meeting(machine, host, world)),
        MachineKind::Device(device) => {
            let above = |rank: &usize| (*rank > 0).then(|| (rank - 1) / CHILDREN);
            let depth = std::iter::successors(Some(world.members() - 1), above).count() - 1;
            Time::saturating(device.host.message.value()) * (2 * depth as u64)
        }
    }
}

/// The cost of a collective, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// Links carry nothing.
    idle: f64,
    /// Links carry bytes, by level: both at the same time.
    carrying: [f64; 2],
}

impl Cost {
    fn seconds(&self) -> f64 {
        let [inside, between] = self.carrying;
        self.idle + inside.max(between)
    }
}

/// Returns the time of the passes over memory of a collective, in seconds.
///
/// With `n` members and buffers of `s` bytes (docs/performance.md, "Collectives between threads"):
/// - all_gather: `s` read, `n s` written past the caches
/// - all_gather of parts: `s` read, `(n - 1) s` written
/// - reduce_scatter: `n s` read, `s` written after its lines were read
/// - reduce_scatter of parts: `n s` read, `s` of them written
/// - all_reduce: `n s` read, `n s` written
///
/// All groups that make it at the same time share the bandwidth.
fn memory_passes(machine: &Machine, shape: &Shape, collective: CollectiveKind, bytes: u64) -> f64 {
    let n = shape.members() as f64;
    let buffers = match collective {
        CollectiveKind::AllGather => 1.0 + n,
        CollectiveKind::AllGatherParts if shape.members() == 1 => 0.0,
        CollectiveKind::AllGatherParts => n,
        CollectiveKind::ReduceScatter => n + 2.0,
        CollectiveKind::ReduceScatterParts => n + 1.0,
        CollectiveKind::AllReduce => 2.0 * n,
    };
    let bandwidth = machine.memory.bandwidth.value() * machine.memory.efficiency.value();
    buffers * bytes as f64 * groups(machine, shape) / bandwidth
}

/// Returns the time in which the members of a group meet, in seconds: if there are more ranks than
/// cores, threads sleep while others run, and a core has one after the other.
fn meeting(machine: &Machine, host: &Threads, shape: &Shape) -> f64 {
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
