//! The costs of a run on a rank: as planned, and as measured independently of the plan.

use hsdp::memory::{self, Category, Usage};
use hsdp::{
    ByteCount, Channel, Flow, LedgerSnapshot, MemoryPlan, Offload, Op, Rank, ShardedModel, Tag,
    World,
};
use serde_json::{Map, Value, json};

use crate::failure::Failure;

/// Name of the collectives of updates.
const UPDATE: &str = "update";

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
    /// Calls of each collective in the whole run, and the bytes that came from other ranks. The
    /// collectives of updates are one entry, `update`.
    traffic: Vec<(&'static str, Compared<Flow>)>,
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
        let traffic = vec![
            (Op::AllGather.name(), compared(planned.all_gather, self.all_gather)),
            (Op::ReduceScatter.name(), compared(planned.reduce_scatter, self.reduce_scatter)),
            (Op::AllReduce.name(), compared(planned.all_reduce, self.all_reduce)),
            (UPDATE, compared(planned.update, self.update)),
        ];
        Costs { traffic, memory: held(model) }
    }
}

impl Costs {
    /// Returns whether calls and bytes are exactly as planned.
    pub(crate) fn is_traffic_as_planned(&self) -> bool {
        self.traffic.iter().all(|(_, flow)| flow.planned == flow.measured)
    }

    /// Returns the costs of all ranks, in their order. Collective.
    ///
    /// # Errors
    /// Errors of an all-gather.
    pub(crate) fn of_all(self, world: &World) -> Result<Vec<Self>, Failure> {
        let flow = |flow: Flow| [flow.calls, flow.bytes.get()];
        let traffic = self.traffic.iter().flat_map(|(_, it)| [it.planned, it.measured]);
        let memory = self.memory.iter().flat_map(|(_, it)| [it.planned, it.measured]);
        let own: Vec<u64> = traffic.flat_map(flow).chain(memory.map(ByteCount::get)).collect();
        let (group, len) = (world.world_group(Channel::User), own.len());
        let all = group.all_gather(Tag::default(), own)?.wait()?;
        Ok(all.chunks(len).map(|numbers| self.with(numbers)).collect())
    }

    /// Returns costs with the names of these, and the numbers of another rank.
    fn with(&self, numbers: &[u64]) -> Self {
        let (traffic, memory) = numbers.split_at(4 * self.traffic.len());
        let flow = |[calls, bytes]: [u64; 2]| Flow { calls, bytes: ByteCount(bytes) };
        let traffic = self.traffic.iter().zip(traffic.as_chunks().0);
        let memory = self.memory.iter().zip(memory.as_chunks().0);
        Self {
            traffic: traffic
                .map(|((name, _), &[a, b, c, d])| {
                    (*name, Compared { planned: flow([a, b]), measured: flow([c, d]) })
                })
                .collect(),
            memory: memory
                .map(|((name, _), &[planned, measured])| {
                    let [planned, measured] = [planned, measured].map(ByteCount);
                    (name.clone(), Compared { planned, measured })
                })
                .collect(),
        }
    }

    /// Returns the traffic to show. Most optimizers have none, and then it is not shown.
    pub(crate) fn traffic(&self) -> impl Iterator<Item = &(&'static str, Compared<Flow>)> {
        let is_none = |it: &Compared<Flow>| [it.planned, it.measured] == [Flow::NONE; 2];
        self.traffic.iter().filter(move |(name, it)| *name != UPDATE || !is_none(it))
    }

    /// Returns the totals of the rank, for `summary.json`.
    pub(crate) fn summary(&self, rank: usize) -> Value {
        let flow = |flow: Flow| json!({ "calls": flow.calls, "bytes": flow.bytes.get() });
        let traffic = self.traffic().map(|(name, Compared { planned, measured })| {
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

/// Checks that calls and bytes are exactly as planned on all ranks. Returns a sentence that says so.
pub(crate) fn check_traffic(costs: &[Costs]) -> Result<String, Failure> {
    let ranks = costs.len();
    match costs.iter().filter(|costs| !costs.is_traffic_as_planned()).count() {
        0 if ranks == 1 => Ok("calls and bytes are exactly as planned".to_owned()),
        0 => Ok(format!("calls and bytes are exactly as planned, on all {ranks} ranks")),
        differ => Err(Failure::Disagreement(format!(
            "calls and bytes are not as planned on {differ} of {ranks} ranks"
        ))),
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
    let update = Category::Update.to_string();
    let shown = host.filter(|(name, _)| offload != Offload::None || *name == update);
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

#[cfg(test)]
mod tests {
    use hsdp::WorldOptions;

    use super::*;

    /// Costs of a rank whose all-gathers receive one byte less than planned for each rank before it.
    fn costs(rank: Rank) -> Costs {
        let flow = |bytes| Flow { calls: 8, bytes: ByteCount(bytes) };
        let compared = Compared { planned: flow(4096), measured: flow(4096 - rank.index() as u64) };
        let memory = Compared { planned: ByteCount(64), measured: ByteCount(rank.index() as u64) };
        Costs { traffic: vec![("all_gather", compared)], memory: vec![("shard".into(), memory)] }
    }

    #[test]
    fn every_rank_gets_the_costs_of_all_and_a_missing_byte_is_found() {
        let ends = crate::threads::run(3, WorldOptions::default(), |world| {
            let all = costs(world.rank()).of_all(&world)?;
            let of_ranks = all.iter().enumerate().map(|(rank, costs)| costs.summary(rank));
            let expected: Vec<Value> =
                (0..3).map(|rank| costs(Rank::new(rank)).summary(rank)).collect();
            assert_eq!(of_ranks.collect::<Vec<_>>(), expected);
            Ok::<_, Failure>(check_traffic(&all).map_err(|failure| failure.to_string()))
        });
        let expected = "verification failed: calls and bytes are not as planned on 2 of 3 ranks";
        for end in ends.expect("all ranks end") {
            assert_eq!(end, Err(expected.to_owned()));
        }
        let one = check_traffic(&[costs(Rank::new(0))]);
        assert_eq!(one.expect("it is as planned"), "calls and bytes are exactly as planned");
    }
}
