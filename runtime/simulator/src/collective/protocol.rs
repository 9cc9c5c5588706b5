//! NCCL's protocols, with the constants of its own model.
//!
//! The source of every constant is `src/graph/tuning.cc` of NCCL 2.30: `ncclTunerConstantsDefaults` has the times, and
//! `ncclTopoTuneModel` the parts of the bandwidth. NCCL's times are absolute; here, those of a step are relative to one of a ring with the
//! protocol Simple, which machine files have.

/// A protocol: the way in which a card learns that data have come.
///
/// LL sends a flag with each four bytes, LL128 one with each 120 bytes. Simple sends only data, and a signal after many.
pub(super) struct Protocol {
    pub(super) ring: Costs,
    pub(super) tree: Costs,
}

/// The costs of an algorithm with a protocol.
pub(super) struct Costs {
    /// Time of a call before its first step, in seconds.
    pub(super) base: f64,
    /// Time of a step in a machine, by the latency of the link.
    pub(super) step: f64,
    /// Time of a step between machines, by the latency of the network.
    pub(super) network_step: f64,
    /// The part of the bandwidth that data have, in one machine.
    pub(super) in_machine: f64,
    /// The same between machines.
    pub(super) between: f64,
}

/// Time of a step of a ring with the protocol Simple by NVLink, in us.
const STEP: f64 = 3.4;
/// The same by network.
const NETWORK_STEP: f64 = 14.0;

/// Costs from `[base, step by NVLink, step by network]` in us, and the parts of the bandwidth in a machine and between machines.
const fn costs(times: [f64; 3], parts: [f64; 2]) -> Costs {
    let [base, step, network_step] = times;
    let [in_machine, between] = parts;
    Costs {
        base: base * 1e-6,
        step: step / STEP,
        network_step: network_step / NETWORK_STEP,
        in_machine,
        between,
    }
}

/// LL, LL128, Simple.
pub(super) const PROTOCOLS: [Protocol; 3] = [
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
