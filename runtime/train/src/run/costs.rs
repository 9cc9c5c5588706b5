//! The costs of a run on a rank: as planned, and as measured independently of the plan.

use hsdp::memory::{self, Category, Usage};
use hsdp::{
    ByteCount, Channel, Flow, LedgerSnapshot, MemoryPlan, Offload, Op, Rank, ShardedModel, Tag,
    Traffic, Update, World,
};
use serde_json::{Map, Value, json};

use crate::failure::Failure;

/// A planned and a measured number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedAndMeasured<T> {
    pub(crate) planned: T,
    pub(crate) measured: T,
}

/// The collectives of the steps of one rank, counted where bytes are copied and reduced.
/// Collectives between steps, as of evaluations, do not count.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    before: Option<LedgerSnapshot>,
    steps: u64,
    /// Steps that were not skipped.
    applied: u64,
    received: Traffic,
    /// Gathers of slices before the first step, and in evaluations of averages. Those of an update
    /// outlast its step, so they are counted in the end.
    other_slices: Option<Flow>,
    /// Gathers of slices before the evaluation that is under way.
    before_evaluation: Flow,
}

/// One rank's costs.
#[derive(Debug)]
pub(crate) struct RankCosts {
    /// Calls in the whole run, and the bytes that came from other ranks.
    traffic: PlannedAndMeasured<Traffic>,
    /// Peak bytes of each category, by its name. They are of the device if the model lies on one,
    /// with those of the host for the offloaded parts, and for an exchange through the host.
    pub(crate) memory: Vec<(String, PlannedAndMeasured<ByteCount>)>,
}

impl Counted {
    /// Begins a step.
    pub(crate) fn begin(&mut self, world: &World) {
        self.before = Some(world.ledger());
        self.other_slices.get_or_insert_with(|| slices(world));
    }

    /// Begins an evaluation: of its gathers of slices none is counted.
    ///
    /// # Errors
    /// Errors of gathers that are under way.
    pub(crate) fn begin_evaluation(&mut self, model: &ShardedModel) -> Result<(), Failure> {
        model.await_slices()?;
        self.before_evaluation = slices(model.world());
        Ok(())
    }

    /// Ends an evaluation.
    pub(crate) fn end_evaluation(&mut self, world: &World) {
        let other = self.other_slices.unwrap_or(self.before_evaluation);
        self.other_slices = Some(other + since(slices(world), self.before_evaluation));
    }

    /// Ends a step.
    pub(crate) fn end(&mut self, world: &World, update: &Update) {
        let Some(before) = self.before.take() else { return };
        let ledger = world.ledger().since(&before);
        // Most optimizers exchange nothing. Gradients are all-reduced on a channel of their own.
        let exchanged = [Op::AllToAll, Op::AllReduce].map(|op| ledger.op(Channel::Reduce, op));
        let step = Traffic {
            all_gather: ledger.op(Channel::Gather, Op::AllGather),
            reduce_scatter: ledger.op(Channel::Reduce, Op::ReduceScatter),
            all_reduce: ledger.op(Channel::AllReduce, Op::AllReduce),
            scatter_sums: ledger.op(Channel::AllReduce, Op::ReduceScatter),
            gather_slices: Flow::NONE,
            statistics: ledger.op(Channel::Statistics, Op::AllReduce),
            update: exchanged.into_iter().sum(),
        };
        self.received = self.received + step;
        self.steps += 1;
        self.applied += u64::from(*update == Update::Applied);
    }

    /// Returns the costs of this rank in the counted steps. Memory is counted by the allocator.
    ///
    /// # Errors
    /// Errors of gathers of slices that are under way.
    pub(crate) fn costs(
        &self,
        model: &ShardedModel,
        microbatches: usize,
    ) -> Result<RankCosts, Failure> {
        model.await_slices()?;
        let of_step = model.plan().traffic(model.rank(), microbatches as u64);
        // A step that is skipped updates nothing.
        let planned = Traffic {
            gather_slices: of_step.gather_slices * self.applied,
            update: of_step.update * self.applied,
            ..of_step * self.steps
        };
        let all = slices(model.world());
        let other = self.other_slices.unwrap_or(all);
        let measured = Traffic { gather_slices: since(all, other), ..self.received };
        Ok(RankCosts { traffic: PlannedAndMeasured { planned, measured }, memory: held(model) })
    }
}

impl RankCosts {
    /// Returns whether calls and bytes are exactly as planned.
    pub(crate) fn is_traffic_as_planned(&self) -> bool {
        self.traffic.planned == self.traffic.measured
    }

    /// Returns the costs of all ranks, in their order. Collective.
    ///
    /// # Errors
    /// Errors of an all-gather.
    pub(crate) fn of_all(self, world: &World) -> Result<Vec<Self>, Failure> {
        let flows = [self.traffic.planned, self.traffic.measured].map(|it| it.flows());
        let traffic = flows.as_flattened().iter().flat_map(|(_, it)| [it.calls, it.bytes.get()]);
        let memory = self.memory.iter().flat_map(|(_, it)| [it.planned.get(), it.measured.get()]);
        let own: Vec<u64> = traffic.chain(memory).collect();
        let group = world.world_group(Channel::User);
        let len = own.len();
        let all = group.all_gather(Tag::default(), own)?.wait()?;
        Ok(all.chunks(len).map(|numbers| self.with(numbers)).collect())
    }

    /// Returns costs with the names of these, and the numbers of another rank.
    fn with(&self, numbers: &[u64]) -> Self {
        let (traffic, memory) = numbers.split_at(2 * 2 * self.traffic.planned.flows().len());
        let mut flows = traffic.as_chunks().0.iter();
        let mut flow = || {
            let &[calls, bytes] = flows.next().expect("each rank sends the flows of both");
            Flow { calls, bytes: ByteCount(bytes) }
        };
        let mut traffic = || Traffic {
            all_gather: flow(),
            reduce_scatter: flow(),
            all_reduce: flow(),
            scatter_sums: flow(),
            gather_slices: flow(),
            statistics: flow(),
            update: flow(),
        };
        let memory = self.memory.iter().zip(memory.as_chunks().0);
        let compared = |((name, _), &[planned, measured]): (&(String, _), &[u64; 2])| {
            let [planned, measured] = [planned, measured].map(ByteCount);
            (name.clone(), PlannedAndMeasured { planned, measured })
        };
        Self {
            traffic: PlannedAndMeasured { planned: traffic(), measured: traffic() },
            memory: memory.map(compared).collect(),
        }
    }

    /// Returns the traffic to show, with the collectives of updates as one entry, `update`. Most
    /// optimizers have none, and most models no statistics: these are not shown then.
    pub(crate) fn traffic(&self) -> impl Iterator<Item = (&'static str, PlannedAndMeasured<Flow>)> {
        let PlannedAndMeasured { planned, measured } = self.traffic;
        let pairs = planned.flows().into_iter().zip(measured.flows());
        pairs
            .map(|((name, planned), (_, measured))| {
                (name, PlannedAndMeasured { planned, measured })
            })
            .filter(|(name, flows)| {
                let rare = ["scatter_sums", "gather_slices", "statistics", "update"];
                let is_rare = rare.contains(name);
                !is_rare || [flows.planned, flows.measured] != [Flow::NONE; 2]
            })
    }

    /// Returns the totals of the rank, for `summary.json`.
    pub(crate) fn summary(&self, rank: usize) -> Value {
        let flow = |flow: Flow| json!({ "calls": flow.calls, "bytes": flow.bytes.get() });
        let traffic = self.traffic().map(|(name, PlannedAndMeasured { planned, measured })| {
            let sides = json!({ "planned": flow(planned), "measured": flow(measured) });
            (name.to_owned(), sides)
        });
        let memory =
            self.memory.iter().map(|(category, PlannedAndMeasured { planned, measured })| {
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

/// Returns the gathers over replicas in a world so far.
fn slices(world: &World) -> Flow {
    world.ledger().op(Channel::AllReduce, Op::AllGather)
}

/// Returns what was counted since an earlier moment.
fn since(now: Flow, before: Flow) -> Flow {
    Flow { calls: now.calls - before.calls, bytes: now.bytes - before.bytes }
}

/// Checks that calls and bytes are exactly as planned on all ranks. Returns a sentence that says
/// so.
pub(crate) fn check_traffic(costs: &[RankCosts]) -> Result<String, Failure> {
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
fn held(model: &ShardedModel) -> Vec<(String, PlannedAndMeasured<ByteCount>)> {
    let plan = model.plan();
    let rank = model.rank();
    // Masters, state and update are those of this rank, where others may have more.
    let own = |planned: MemoryPlan, update: ByteCount, masters: ByteCount| {
        let optimizer = planned.optimizer.min(plan.optimizer_state(rank));
        let shard = planned.shard.min(masters);
        MemoryPlan { shard, optimizer, update, ..planned }
    };
    let update = plan.update(rank);
    let masters = plan.masters(rank);
    if !model.is_on_device() {
        return peaks(rank, &own(plan.memory(), update.extra, masters), memory::usage);
    }
    let offload = model.options().placement.offload();
    let [on_host, on_device] = match offload {
        Offload::None => update.extra_with_device,
        Offload::Optimizer | Offload::All => [update.extra, ByteCount::ZERO],
    };
    let device = own(plan.memory_on_device(offload), on_device, masters);
    let offloaded = plan.memory_offloaded(offload);
    let masters = match offload {
        Offload::None | Offload::Optimizer => offloaded.shard,
        Offload::All => plan.masters_offloaded(rank),
    };
    let host = own(offloaded, on_host, masters);
    let mut held = peaks(rank, &device, memory::usage_on_device);
    let host = peaks(rank, &host, memory::usage).into_iter();
    // Without offloading the host has the matrices that go from rank to rank, and the buffers.
    let on_host = [Category::Update, Category::Buffers].map(|category| category.to_string());
    let shown = host.filter(|(name, _)| offload != Offload::None || on_host.contains(name));
    held.extend(shown.map(|(name, peak)| (format!("{name} (host)"), peak)));
    held
}

fn peaks(
    rank: Rank,
    plan: &MemoryPlan,
    usage: fn(Rank, Category) -> Usage,
) -> Vec<(String, PlannedAndMeasured<ByteCount>)> {
    let categories = [
        Category::Shard,
        Category::GatherInput,
        Category::Full,
        Category::GradFull,
        Category::Partial,
        Category::Optimizer,
        Category::Update,
        Category::Buffers,
    ];
    let peak = |(category, (name, planned)): (Category, (&str, ByteCount))| {
        (name.to_owned(), PlannedAndMeasured { planned, measured: usage(rank, category).peak })
    };
    categories.into_iter().zip(plan.categories()).map(peak).collect()
}

#[cfg(test)]
mod tests {
    use hsdp::WorldOptions;

    use super::*;

    /// Costs of a rank whose all-gathers receive one byte less than planned for each rank before
    /// it.
    fn costs(rank: Rank) -> RankCosts {
        let flow = |bytes| Flow { calls: 8, bytes: ByteCount(bytes) };
        let traffic = |bytes| Traffic { all_gather: flow(bytes), ..Traffic::default() };
        let measured = traffic(4096 - rank.index() as u64);
        let memory =
            PlannedAndMeasured { planned: ByteCount(64), measured: ByteCount(rank.index() as u64) };
        RankCosts {
            traffic: PlannedAndMeasured { planned: traffic(4096), measured },
            memory: vec![("shard".into(), memory)],
        }
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
