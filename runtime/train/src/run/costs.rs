//! The costs of a run on a rank: as planned, and as measured independently of the plan.

use hsdp::memory::{self, Category, Usage};
use hsdp::{
    ByteCount, Channel, Flow, LedgerSnapshot, MemoryPlan, Offload, Op, Rank, ShardedModel, World,
};
use serde_json::{Map, Value, json};

/// A planned and a measured number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compared<T> {
    pub(crate) planned: T,
    pub(crate) measured: T,
}

/// The collectives of the steps of one rank, counted where bytes are copied and reduced. Collectives
/// between steps, as of evaluations, do not count.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    before: Option<LedgerSnapshot>,
    steps: u64,
    all_gather: Flow,
    reduce_scatter: Flow,
    all_reduce: Flow,
    update: Flow,
}

/// One rank's costs.
#[derive(Debug)]
pub(crate) struct Costs {
    /// Calls of each collective in the whole run, and the bytes that came from other ranks. Those of
    /// updates are one, `update`.
    pub(crate) traffic: Vec<(&'static str, Compared<Flow>)>,
    /// Peak bytes of each category, by its name. They are of the device if the model lies on one,
    /// with those of the host for the offloaded parts, and for an exchange through the host.
    pub(crate) memory: Vec<(String, Compared<ByteCount>)>,
}

impl Counted {
    /// Begins a step.
    pub(crate) fn begin(&mut self, world: &World) {
        self.before = Some(world.ledger());
    }

    /// Ends a step.
    pub(crate) fn end(&mut self, world: &World) {
        let Some(before) = self.before.take() else { return };
        let ledger = world.ledger().since(&before);
        let add = |sum: &mut Flow, flow: Flow| *sum = [*sum, flow].into_iter().sum();
        add(&mut self.all_gather, ledger.op(Channel::Gather, Op::AllGather));
        add(&mut self.reduce_scatter, ledger.op(Channel::Reduce, Op::ReduceScatter));
        add(&mut self.all_reduce, ledger.op(Channel::AllReduce, Op::AllReduce));
        // Most optimizers exchange nothing. Gradients are all-reduced on a channel of their own.
        for op in [Op::AllToAll, Op::AllReduce] {
            add(&mut self.update, ledger.op(Channel::Reduce, op));
        }
        self.steps += 1;
    }

    /// Returns the costs of this rank in the counted steps. Memory is counted by the allocator.
    pub(crate) fn costs(&self, model: &ShardedModel, microbatches: usize) -> Costs {
        let planned = model.plan().traffic(model.rank(), microbatches as u64);
        let compared = |planned: Flow, measured| {
            let (calls, bytes) = (planned.calls * self.steps, planned.bytes * self.steps);
            Compared { planned: Flow { calls, bytes }, measured }
        };
        let mut traffic = vec![
            (Op::AllGather.name(), compared(planned.all_gather, self.all_gather)),
            (Op::ReduceScatter.name(), compared(planned.reduce_scatter, self.reduce_scatter)),
            (Op::AllReduce.name(), compared(planned.all_reduce, self.all_reduce)),
        ];
        let update = compared(planned.update, self.update);
        if [update.planned, update.measured] != [Flow::NONE; 2] {
            traffic.push(("update", update));
        }
        Costs { traffic, memory: held(model) }
    }
}

impl Costs {
    /// Returns whether calls and bytes are exactly as planned.
    pub(crate) fn is_traffic_as_planned(&self) -> bool {
        self.traffic.iter().all(|(_, flow)| flow.planned == flow.measured)
    }

    /// Returns the totals of the rank, for `summary.json`.
    pub(crate) fn summary(&self, rank: usize) -> Value {
        let flow = |flow: Flow| json!({ "calls": flow.calls, "bytes": flow.bytes.get() });
        let traffic = self.traffic.iter().map(|(name, Compared { planned, measured })| {
            let sides = json!({ "planned": flow(*planned), "measured": flow(*measured) });
            ((*name).to_owned(), sides)
        });
        let memory = self.memory.iter().map(|(category, Compared { planned, measured })| {
            let sides = json!({ "planned": planned.get(), "measured": measured.get() });
            (category.clone(), sides)
        });
        json!({
            "rank": rank,
            "collectives": traffic.collect::<Map<_, _>>(),
            "peak_memory_bytes": memory.collect::<Map<_, _>>(),
        })
    }
}

/// Returns this rank's peak memory, planned and measured.
fn held(model: &ShardedModel) -> Vec<(String, Compared<ByteCount>)> {
    let (plan, rank) = (model.plan(), model.rank());
    // State and update are those of this rank, where others may have more.
    let own = |planned: MemoryPlan, update: ByteCount| {
        let optimizer = planned.optimizer.min(plan.optimizer_state(rank));
        MemoryPlan { optimizer, update, ..planned }
    };
    let update = plan.update(rank);
    if !model.is_on_device() {
        return peaks(rank, &own(plan.memory(), update.extra), memory::usage);
    }
    let offload = model.options().placement.offload();
    let [on_host, on_device] = match offload {
        Offload::None => update.extra_with_device,
        Offload::Optimizer | Offload::All => [update.extra, ByteCount::ZERO],
    };
    let device = own(plan.memory_on_device(offload), on_device);
    let host = own(plan.memory_offloaded(offload), on_host);
    let mut held = peaks(rank, &device, memory::usage_on_device);
    let host = peaks(rank, &host, memory::usage).into_iter();
    // Without offloading the host has the matrices that go from rank to rank, and nothing else.
    let shown = host.filter(|(_, peak)| offload != Offload::None || peak.planned > ByteCount::ZERO);
    held.extend(shown.map(|(name, peak)| (format!("{name} (host)"), peak)));
    held
}

fn peaks(
    rank: Rank,
    plan: &MemoryPlan,
    usage: fn(Rank, Category) -> Usage,
) -> Vec<(String, Compared<ByteCount>)> {
    let peak = |category: Category, planned| {
        (category.to_string(), Compared { planned, measured: usage(rank, category).peak })
    };
    vec![
        peak(Category::Shard, plan.shard),
        peak(Category::GatherInput, plan.gather_input),
        peak(Category::Full, plan.full),
        peak(Category::GradFull, plan.grad_full),
        peak(Category::Partial, plan.partial),
        peak(Category::Optimizer, plan.optimizer),
        peak(Category::Update, plan.update),
    ]
}
