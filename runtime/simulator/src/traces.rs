//! Traces of a simulated step, for other tools: a timeline, and the graph of its nodes for simulators of networks. SIMULATOR.md, "Traces".

mod chakra;
mod names;
mod timeline;

use hsdp_sharding::ModelSpec;

use crate::simulation::{Costs, Orders};

/// The traces of a step.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "costs need not be shown")]
pub struct Traces<'a> {
    /// The orders of its ranks.
    pub orders: &'a Orders,
    /// The model whose units the orders name.
    pub spec: &'a ModelSpec,
    /// The costs of its actions.
    pub costs: &'a dyn Costs,
}
