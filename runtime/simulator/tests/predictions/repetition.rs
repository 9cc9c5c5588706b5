//! Microbatches that repeat are not simulated, and the times of all are those of a simulation of each.

use std::cell::Cell;
use std::sync::Arc;

use hsdp_sharding::{Accumulation, DType, Mesh, Offload, Plan, PlanOptions, Rank};
use hsdp_simulator::{
    Batch, Costs, GptShape, Machine, Members, Microbatches, OperationCost, Recompute,
    StepOperation, Timing, Work, WorkCost, Workload, simulate, trace,
};

/// The costs of a step, and how often that of an operation was asked for: once for each operation of a microbatch that is simulated.
struct Counted<C> {
    costs: C,
    operations: Cell<u64>,
}

impl<C: Costs> Costs for Counted<C> {
    fn shape(&self, members: Members, first: Rank) -> usize {
        self.costs.shape(members, first)
    }

    fn operation(&self, operation: &StepOperation, shape: usize) -> OperationCost {
        self.operations.set(self.operations.get() + 1);
        self.costs.operation(operation, shape)
    }

    fn work(&self, work: Work) -> WorkCost {
        self.costs.work(work)
    }
}

fn workload(mesh: [usize; 2], accumulation: Accumulation, microbatches: Microbatches) -> Workload {
    let model = GptShape { width: 1024, heads: 16, layers: 6, context: 1024, vocabulary: 50_257 };
    let dtype = DType::BF16;
    let options =
        PlanOptions { param_dtype: dtype, reduce_dtype: dtype, accumulation, ..Default::default() };
    let mesh = Mesh::new(mesh[0], mesh[1]).expect("a mesh");
    Workload {
        plan: Arc::new(Plan::new(model.spec(), mesh, options).expect("a plan")),
        computation: Arc::new(model.computation().expect("a GPT")),
        batch: Batch { sequences: 2, context: 1024, dtype, recompute: Recompute::Nothing },
        microbatches,
        offload: Offload::None,
    }
}

/// The timing of a step on machines of eight cards, that of a simulation of all microbatches, and the number of operations that were simulated.
fn both(workload: &Workload) -> [(Timing, u64); 2] {
    let machine = Machine::bundled("h100-cluster").expect("it is bundled");
    let order = workload.order(&machine);
    let counted = |run: &dyn Fn(&dyn Costs) -> Timing| {
        let costs = workload.costs(&machine).expect("it fits");
        let counted = Counted { costs, operations: Cell::new(0) };
        (run(&counted), counted.operations.get())
    };
    let all = |costs: &dyn Costs| trace(&order, costs).expect("it ends").0;
    [counted(&|costs| simulate(&order, costs).expect("it ends")), counted(&all)]
}

/// Ranks 6 to 11 are on two machines, so their shard group is slower than that of ranks 0 to 5, which it meets at the end of the step only.
#[test]
fn shard_groups_repeat_each_in_its_own_time() {
    for accumulation in Accumulation::ALL {
        let of = |count| both(&workload([2, 6], accumulation, Microbatches::Given(count)));
        let [(skipped, few), (all, many)] = of(40);
        assert!(skipped.ranks.len() > 1, "groups differ");
        assert_eq!(skipped, all, "{accumulation}");
        assert!(4 * few < many, "{accumulation}: {few} of {many}");
    }
}

/// The work of a simulation depends on the kinds of ranks, and neither on their number nor on that of microbatches.
#[test]
fn ten_thousand_ranks_take_no_more_work_than_sixteen() {
    let operations = |mesh, count| {
        let workload = workload(mesh, Accumulation::ReduceScatter, Microbatches::Given(count));
        let [(timing, operations), _] = both(&workload);
        assert_eq!(timing.ranks.len(), 1);
        operations
    };
    let few = operations([2, 8], 8);
    assert_eq!(operations([1250, 8], 8), few);
    assert_eq!(operations([1250, 8], 200), few);
}
