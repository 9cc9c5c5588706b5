//! The costs of a run on a rank: as planned, and as measured independently of the plan.

use hsdp::Offload;
use hsdp::memory::{self, Category, Usage};
use hsdp::{ByteCount, Channel, Flow, LedgerSnapshot, MemoryPlan, Op, Rank, ShardedModel};

use super::failure::Failure;
use super::options::RunOptions;

/// A planned and a measured number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compared<T> {
    pub(crate) planned: T,
    pub(crate) measured: T,
}

/// One rank's costs.
#[derive(Debug)]
pub(crate) struct Costs {
    /// The calls of each collective in the whole run, and the bytes that came from other ranks. Those of updates are one, `update`.
    pub(crate) traffic: Vec<(&'static str, Compared<Flow>)>,
    /// The peak bytes of each category, by its name. They are of the device if the model lies on one, with those of the host for
    /// the offloaded parts, and for an exchange through the host.
    pub(crate) memory: Vec<(String, Compared<ByteCount>)>,
}

impl Costs {
    /// The costs of this rank in the `steps` steps since `before`. Bytes are counted where they are copied and reduced,
    /// memory by the allocator.
    pub(crate) fn of(
        model: &ShardedModel,
        (before, steps): (&LedgerSnapshot, u64),
        options: &RunOptions,
    ) -> Self {
        let ledger = model.world().ledger().since(before);
        let planned = model.plan().traffic(model.rank(), options.microbatches as u64);
        let whole_run = |flow: Flow| Flow { calls: flow.calls * steps, bytes: flow.bytes * steps };
        let flow = |channel, op: Op, planned| {
            let measured = ledger.op(channel, op);
            (op.name(), Compared { planned: whole_run(planned), measured })
        };
        let mut traffic = vec![
            flow(Channel::Gather, Op::AllGather, planned.all_gather),
            flow(Channel::Reduce, Op::ReduceScatter, planned.reduce_scatter),
            flow(Channel::AllReduce, Op::AllReduce, planned.all_reduce),
        ];
        // Most optimizers exchange nothing. Gradients are all-reduced on a channel of their own.
        let in_update = [Op::AllToAll, Op::AllReduce].map(|op| ledger.op(Channel::Reduce, op));
        let (planned, measured) = (whole_run(planned.update), in_update.into_iter().sum());
        if planned != Flow::NONE || measured != Flow::NONE {
            traffic.push(("update", Compared { planned, measured }));
        }
        Self { traffic, memory: held(model) }
    }

    /// Whether calls and bytes are exactly as planned.
    fn traffic_as_planned(&self) -> bool {
        self.traffic.iter().all(|(_, flow)| flow.planned == flow.measured)
    }
}

/// This rank's peak memory, planned and measured.
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

/// Checks that calls and bytes are exactly as planned on all ranks of this process. Returns a sentence that says so.
pub(crate) fn check_traffic(ranks: &[Costs]) -> Result<String, Failure> {
    let differ = ranks.iter().filter(|costs| !costs.traffic_as_planned()).count();
    match differ {
        // Each other process compares its own.
        0 if ranks.len() == 1 => Ok("calls and bytes are exactly as planned".to_owned()),
        0 => Ok(format!("calls and bytes are exactly as planned, on all {} ranks", ranks.len())),
        _ => Err(Failure::Disagreement(format!(
            "calls and bytes are not as planned on {differ} of {} ranks",
            ranks.len()
        ))),
    }
}
