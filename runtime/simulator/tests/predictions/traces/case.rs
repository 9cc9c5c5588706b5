//! Steps of small models, with costs that tests choose.

use std::sync::Arc;

use hsdp_flight::Stage;
use hsdp_sharding::{
    Accumulation, Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, StateOver, Unit,
};
use hsdp_simulator::{
    Costs, Members, Microbatches, ModelPlacement, OperationCost, Order, StepOperation, Time,
    Traces, Work, WorkCost,
};

/// A step, and the costs of its actions in some unit of time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) mesh: [usize; 2],
    pub(crate) placement: ModelPlacement,
    pub(crate) accumulation: Accumulation,
    pub(crate) microbatches: Microbatches,
    pub(crate) prefetch: usize,
    pub(crate) state: StateOver,
    /// Number of units with a batch norm, from the first on.
    pub(crate) batch_norms: usize,
    pub(crate) costs: Given,
}

/// The step of most tests.
pub(crate) const CASE: Case = Case {
    mesh: [2, 2],
    placement: ModelPlacement::Device,
    accumulation: Accumulation::ReduceScatter,
    microbatches: Microbatches::Given(3),
    prefetch: 1,
    state: StateOver::Shards,
    batch_norms: 0,
    costs: Given {
        unit: 1_000_000,
        gather: 5,
        reduce: 7,
        all_reduce: 30,
        exchange: 2,
        call: 1,
        launch: 2,
        computation: 11,
    },
};

/// Costs in multiples of a time. Units differ: the second takes twice as long as the first, and so
/// on. Groups of odd shard groups are slower.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given {
    /// In picoseconds.
    pub(crate) unit: u64,
    pub(crate) gather: u64,
    pub(crate) reduce: u64,
    pub(crate) all_reduce: u64,
    pub(crate) exchange: u64,
    pub(crate) call: u64,
    pub(crate) launch: u64,
    pub(crate) computation: u64,
}

/// The results that a test reads.
pub(crate) struct Prepared {
    pub(crate) order: Order,
    pub(crate) spec: ModelSpec,
    pub(crate) costs: CaseCosts,
}

impl Prepared {
    pub(crate) fn traces(&self) -> Traces<'_> {
        Traces { order: &self.order, spec: &self.spec, costs: &self.costs }
    }
}

impl Case {
    pub(crate) fn prepare(self) -> Prepared {
        let unit = |(index, name): (usize, &str)| {
            let unit = Unit::new(name)
                .param(Param::new(format!("{name}.w"), [10]))
                .param(Param::new(format!("{name}.b"), [2]));
            if index < self.batch_norms { unit.batch_norm(&format!("{name}.bn"), 3) } else { unit }
        };
        let names = ["embed", "layers.0", "layers.\"1\""].into_iter().enumerate();
        let spec = names.map(unit).fold(ModelSpec::new(), ModelSpec::unit);
        let mesh = Mesh::new(self.mesh[0], self.mesh[1]).expect("a mesh");
        let Self { accumulation, prefetch, state, .. } = self;
        let options = PlanOptions { accumulation, prefetch, state, ..PlanOptions::default() };
        let plan = Arc::new(Plan::new(spec.clone(), mesh, options).expect("a plan"));
        let order = Order::of(&plan, self.microbatches, self.placement);
        Prepared { order, spec, costs: CaseCosts { case: self, mesh } }
    }
}

/// The costs of a case.
pub(crate) struct CaseCosts {
    case: Case,
    mesh: Mesh,
}

impl CaseCosts {
    fn time(&self, multiple: u64) -> Time {
        Time::from_picoseconds(multiple * self.case.costs.unit)
    }
}

impl Costs for CaseCosts {
    fn shape(&self, members: Members, first: Rank) -> usize {
        match members {
            Members::Shard => self.mesh.coordinate(first).replicate_index % 2,
            Members::Replicate | Members::World => 0,
        }
    }

    fn operation(&self, operation: &StepOperation, shape: usize) -> OperationCost {
        let Given { gather, reduce, all_reduce, exchange, call, .. } = self.case.costs;
        let unit = operation.unit.map_or(1, |unit| 1 + unit.index() as u64);
        let link = match operation.stage {
            Stage::Gather => gather * unit * (1 + shape as u64),
            Stage::Reduce => reduce * unit,
            Stage::AllReduce | Stage::ScatterSums | Stage::GatherSlices => all_reduce * unit,
            _ => exchange,
        };
        let moves = operation.members.count(self.mesh) > 1;
        let link = if moves { self.time(link) } else { Time::ZERO };
        OperationCost { host: self.time(call), link, busy: [link, Time::ZERO] }
    }

    fn work(&self, work: Work) -> WorkCost {
        let Given { launch, computation, .. } = self.case.costs;
        let multiple = match work {
            Work::Forward(unit) => 1 + unit.index() as u64,
            Work::Backward(unit) => 2 * (1 + unit.index() as u64),
            _ => 1,
        };
        let time = self.time(computation * multiple);
        match self.case.placement {
            ModelPlacement::Host => WorkCost { host: time, device: Time::ZERO },
            ModelPlacement::Device => WorkCost { host: self.time(launch), device: time },
        }
    }
}
