//! Collectives of ranks on cards.

use super::shape::ShapePart;
use super::{CollectiveKind, Cost, Shape};
use crate::machine::{DeviceMachine, Machine, NetworkLink};

/// The links between the members of a group.
pub(super) struct Route<'a> {
    shape: &'a Shape,
    members: f64,
    machines: usize,
    /// Most members on a machine.
    most: usize,
    /// Seconds of a step in a machine.
    step: f64,
    /// Bytes a second of a card in its machine.
    bandwidth: f64,
    /// The network, if the group spans machines.
    network: Option<Network>,
    /// Bytes a second that a card reads and writes.
    memory: f64,
}

/// The network between the machines of a group.
struct Network {
    /// Seconds of a step.
    step: f64,
    /// Bytes a second of a machine.
    bandwidth: f64,
    adapters: f64,
    /// Cards for each adapter.
    cards: f64,
}

impl Network {
    fn new(link: &NetworkLink, cards: f64) -> Self {
        let adapters = link.adapters.value();
        Self {
            step: link.latency.value(),
            bandwidth: link.bandwidth.value() * link.efficiency.value(),
            adapters,
            cards: cards / adapters,
        }
    }

    /// Bytes a second that a group has on a machine: those of its members' adapters, and no more
    /// than its part of all.
    fn of_group(&self, part: &ShapePart) -> f64 {
        let own = (part.members as f64 / self.cards).ceil().min(self.adapters);
        self.bandwidth * (own / self.adapters).min(1.0 / part.groups as f64)
    }
}

impl<'a> Route<'a> {
    pub(super) fn new(machine: &Machine, device: &DeviceMachine, shape: &'a Shape) -> Self {
        let link = &device.links.machine;
        let network = device.links.network.as_ref();
        let machines = shape.machines();
        let network = network.filter(|_| machines > 1);
        Self {
            shape,
            members: shape.members() as f64,
            machines,
            most: shape.most_members(),
            step: link.latency.value(),
            bandwidth: link.bandwidth.value() * link.efficiency.value(),
            network: network.map(|link| Network::new(link, machine.ranks.value())),
            memory: machine.memory.bandwidth.value() * machine.memory.efficiency.value(),
        }
    }

    /// Returns the cost of a collective from its start on the card. NCCL takes the algorithm and
    /// the protocol that are fastest by its model.
    pub(super) fn cost(&self, collective: CollectiveKind, bytes: u64) -> Cost {
        let bytes = bytes as f64;
        let rings = PROTOCOLS.iter().map(|protocol| self.ring(protocol, collective, bytes));
        let trees = PROTOCOLS.iter().map(|protocol| self.tree(protocol, bytes));
        let trees = trees.filter(|_| collective == CollectiveKind::AllReduce);
        rings
            .chain(trees)
            .min_by(|one, other| one.seconds().total_cmp(&other.seconds()))
            .unwrap_or_default()
    }

    /// Returns the cost of a ring through all members, from machine to machine. A round has `n - 1`
    /// steps, and each member sends `1/n` of the bytes in each step. An all_reduce has two rounds:
    /// a reduce_scatter and an all_gather.
    ///
    /// NCCL: `nsteps` and `nInterSteps` for the latency; for the bandwidth, that of the slowest
    /// link by `nRanks / nsteps`. The factor 1.4 by which NCCL raises the latency of large
    /// all_reduces between machines is left out. The passes of [`own_part`](Self::own_part) and
    /// [`padding`](Self::padding) are not in NCCL's model.
    fn ring(&self, protocol: &Protocol, collective: CollectiveKind, bytes: f64) -> Cost {
        let costs = &protocol.ring;
        // "With ppn=1 latencies are fully exposed, use the Tree network latency".
        let exposed = if self.most == 1 { &protocol.tree } else { costs };
        let rounds = if collective == CollectiveKind::AllReduce { 2.0 } else { 1.0 };
        let between = (self.machines - 1) as f64;
        let inside = self.members - 1.0 - between;
        let steps = inside * self.step * costs.step + between * self.network_step(exposed);
        let moved = rounds * (self.members - 1.0) / self.members * bytes;
        let passes = self.own_part(collective) + self.padding(collective);
        let idle = costs.base + rounds * steps + passes * bytes / self.members / self.memory;
        Cost { idle, carrying: self.carrying([moved; 2], costs) }
    }

    /// Returns the passes over `1/n` of the bytes in which a member handles the part that it needs
    /// not send: it adds its elements to the sum that it received, or copies its shard into the
    /// output. The link carries nothing then.
    ///
    /// In tests/a100_node_all_reduce.csv, the time of a byte depends on the number of members as
    /// that of such a pass: a fit finds 3.04 bytes of memory for a byte of an all_reduce, beside
    /// the two readings and the writing that there are.
    fn own_part(&self, collective: CollectiveKind) -> f64 {
        match collective {
            CollectiveKind::AllReduce
            | CollectiveKind::ReduceScatter
            | CollectiveKind::ReduceScatterParts => 3.0,
            CollectiveKind::AllGather | CollectiveKind::AllGatherParts => 2.0,
        }
    }

    /// Returns the passes over `1/n` of the bytes in which a member copies parts to buffers where
    /// all of them have one length, for NCCL, and parts back from there. A gather copies the own
    /// part to such a buffer, and those of the others back. A sum copies all parts to such a
    /// buffer, and the own sum back. Each copy reads and writes.
    fn padding(&self, collective: CollectiveKind) -> f64 {
        let copies = match collective {
            CollectiveKind::AllGatherParts => self.members,
            CollectiveKind::ReduceScatterParts => self.members + 1.0,
            _ => 0.0,
        };
        2.0 * copies
    }

    /// Returns the cost of two binary trees of machines, each with half of the bytes, in which the
    /// inner nodes of one are leaves of the other. The members of a machine are a chain. Sums go
    /// up, results go down, so a card sends the bytes twice. So does a machine with two others
    /// below it; if there are only two, each is the root of one tree.
    ///
    /// NCCL: `2 * ((nRanks / nNodes - 1) * intraLat + log2i(nNodes) * interLat)`, and the ratio 0.5
    /// of bandwidths, of which that of the network does not count for two nodes. Its corrections
    /// for some sizes (`treeCorrectionFactor`) are left out.
    fn tree(&self, protocol: &Protocol, bytes: f64) -> Cost {
        let costs = &protocol.tree;
        let chain = (self.most - 1) as f64;
        let depth = f64::from(self.machines.ilog2());
        let steps = chain * self.step * costs.step + depth * self.network_step(costs);
        let between = if self.machines == 2 { bytes } else { 2.0 * bytes };
        Cost {
            idle: costs.base + 2.0 * steps,
            carrying: self.carrying([2.0 * bytes, between], costs),
        }
    }

    /// Seconds of a step by network.
    fn network_step(&self, costs: &ProtocolCosts) -> f64 {
        self.network.as_ref().map_or(0.0, |network| network.step * costs.network_step)
    }

    /// Seconds for which a member's links carry the bytes that it sends in its machine, and by
    /// network.
    fn carrying(&self, [inside, between]: [f64; 2], costs: &ProtocolCosts) -> [f64; 2] {
        let inside = if self.most > 1 { inside / self.bandwidth } else { 0.0 };
        let Some(network) = &self.network else { return [inside / costs.in_machine, 0.0] };
        let of_group = self.shape.parts().iter().map(|part| network.of_group(part));
        let between = between / of_group.fold(f64::INFINITY, f64::min);
        [inside / costs.between, between / costs.between]
    }
}

// The source of every constant below is `src/graph/tuning.cc` of NCCL 2.30:
// `ncclTunerConstantsDefaults` has the times, and `ncclTopoTuneModel` the parts of the bandwidth.
// NCCL's times are absolute. Here, the times of a step are relative to one of a ring with the
// protocol Simple, which machine files have.

/// A protocol: the way in which a card learns that data have come.
///
/// LL sends a flag with each four bytes, LL128 one with each 120 bytes. Simple sends only data, and
/// a signal after many.
struct Protocol {
    ring: ProtocolCosts,
    tree: ProtocolCosts,
}

/// The costs of an algorithm with a protocol.
struct ProtocolCosts {
    /// Time of a call before its first step, in seconds.
    base: f64,
    /// Time of a step in a machine, by the latency of the link.
    step: f64,
    /// Time of a step between machines, by the latency of the network.
    network_step: f64,
    /// The part of the bandwidth that data have, in one machine.
    in_machine: f64,
    /// The part of the bandwidth that data have between machines.
    between: f64,
}

/// Time of a step of a ring with the protocol Simple by NVLink, in us.
const NVLINK_STEP: f64 = 3.4;
/// Time of such a step by network, in us.
const NETWORK_STEP: f64 = 14.0;

/// Returns costs from `[base, step by NVLink, step by network]` in us, and the parts of the
/// bandwidth in a machine and between machines.
const fn costs(times: [f64; 3], parts: [f64; 2]) -> ProtocolCosts {
    let [base, step, network_step] = times;
    let [in_machine, between] = parts;
    ProtocolCosts {
        base: base * 1e-6,
        step: step / NVLINK_STEP,
        network_step: network_step / NETWORK_STEP,
        in_machine,
        between,
    }
}

/// LL, LL128, Simple.
const PROTOCOLS: [Protocol; 3] = [
    Protocol {
        ring: costs([6.6, 0.6, 2.7], [0.5, 0.5]),
        tree: costs([6.8, 0.6, 5.0], [0.92 / 3.8, 0.92 / 3.8]),
    },
    Protocol {
        ring: costs([14.0, 1.9, 4.0], [0.92, 0.92]),
        tree: costs([14.0, 1.25, 8.5], [0.92 * 7.0 / 9.0, 0.92 * 120.0 / 128.0]),
    },
    Protocol {
        ring: costs([8.4, 3.4, 14.0], [1.0, 1.0]),
        tree: costs([8.4, 4.0, 14.0], [0.92, 0.92]),
    },
];
