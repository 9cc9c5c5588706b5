//! Exact calls and bytes of a step's collectives.

use std::iter::Sum;
use std::ops::{Add, Mul};

use super::{Accumulation, FullCopies, Plan};
use crate::{Axis, ByteCount, DType, ElemCount, Phase, Rank, Statistics, UnitId, balanced};

/// The number of calls of one kind of collective on a rank, and the bytes that the rank receives in
/// them.
///
/// Arithmetic is checked: the operators panic if a count exceeds `u64::MAX`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The number of calls in which the rank takes part.
    pub calls: u64,
    /// The bytes that the rank receives from other ranks, padding included.
    pub bytes: ByteCount,
}

impl Flow {
    /// No calls and no bytes.
    pub const NONE: Self = Self { calls: 0, bytes: ByteCount::ZERO };

    /// One call in which the rank receives `bytes`.
    const fn call(bytes: ByteCount) -> Self {
        Self { calls: 1, bytes }
    }
}

impl Add for Flow {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let calls = self.calls.checked_add(other.calls).expect("a count of calls exceeds u64::MAX");
        Self { calls, bytes: self.bytes + other.bytes }
    }
}

impl Mul<u64> for Flow {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        let calls = self.calls.checked_mul(times).expect("a count of calls exceeds u64::MAX");
        Self { calls, bytes: self.bytes * times }
    }
}

impl Sum for Flow {
    fn sum<I: Iterator<Item = Self>>(flows: I) -> Self {
        flows.fold(Self::NONE, Add::add)
    }
}

/// The calls of one rank, and the bytes that it receives, in one step, for each kind of collective.
///
/// There are S ranks in a shard group, R ranks in a replicate group, and K microbatches. A unit has
/// `shard_len` elements in a shard, of which n are trainable. In one call a rank receives
///
/// | collective | bytes from other ranks |
/// |---|---|
/// | all-gather | (S - 1) · shard_len · size([compute dtype](Plan::compute_dtype)) |
/// | reduce-scatter | (S - 1) · n · size(reduce_dtype) |
/// | all-reduce | (R - 1) · len_i · size(reduce_dtype) + (n - len_i) · 4 |
///
/// With [`FullCopies::PerProcess`](crate::FullCopies::PerProcess) all R · S ranks take part in an
/// all-gather. Rank 0, which holds the copy that all ranks read, receives these bytes, and the
/// other ranks receive none.
///
/// Here len_i is the length of the rank's slice of the [`balanced`](crate::balanced) split of n
/// over its replicate group. The rank receives the contributions to its own slice in the wire
/// dtype, and the finished sums of the other slices in f32. With G gathers and g reductions in a
/// microbatch ([`Plan::gathers`], [`Plan::reductions`]) the calls of a step are
///
/// | accumulation | all-gather | reduce-scatter | all-reduce |
/// |---|---|---|---|
/// | `ReduceScatter` | K · G | K · g | g |
/// | `Every` | K · G | K · g | K · g |
/// | `Local` | K · G | g | g |
///
/// If replicas [divide](Plan::divides_state) state there are no all-reduces. With `slice` for the
/// length of the rank's [slice](Plan::slice), a rank receives in their place
///
/// | collective | bytes from other ranks |
/// |---|---|
/// | reduce-scatter of sums | (R - 1) · slice · size(reduce_dtype) |
/// | gather of slices | (n - slice) · size([compute dtype](Plan::compute_dtype)) |
///
/// There are as many reduce-scatters of sums as there would be all-reduces, and g gathers of slices
/// after each step that is not skipped.
///
/// [Statistics](crate::Statistics) of e elements are summed over all W = R · S ranks, in the
/// forward and in the backward of each microbatch: (W - 1) · e_i · 8 + (e - e_i) · 8 bytes a call.
///
/// Once a step, ranks exchange the matrices that owners update, by all-to-alls among the
/// [updaters](Plan::updaters), and add up the sums of factored state, by all-reduces over the
/// world: [`UpdatePlan`](crate::UpdatePlan) has the formulas.
///
/// Collectives over an axis of size 1 count no calls and no bytes. The same holds for a step
/// without microbatches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Traffic {
    /// All-gathers of parameters, over the shard axis.
    pub all_gather: Flow,
    /// Reduce-scatters of gradients, over the shard axis.
    pub reduce_scatter: Flow,
    /// All-reduces of partials, over the replicate axis.
    pub all_reduce: Flow,
    /// Reduce-scatters of partials, over the replicate axis.
    pub scatter_sums: Flow,
    /// Gathers of updated slices, over the replicate axis.
    pub gather_slices: Flow,
    /// All-reduces of [statistics](crate::Unit::statistics), over the world.
    pub statistics: Flow,
    /// All-to-alls and all-reduces of an update, over the shard axis or over the world.
    pub update: Flow,
}

impl Traffic {
    /// The sum over all collectives.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn total(&self) -> Flow {
        self.flows().into_iter().map(|(_, flow)| flow).sum()
    }

    /// Returns the flow of each kind of collective, by its name.
    #[must_use]
    pub const fn flows(&self) -> [(&'static str, Flow); 7] {
        [
            ("all_gather", self.all_gather),
            ("reduce_scatter", self.reduce_scatter),
            ("all_reduce", self.all_reduce),
            ("scatter_sums", self.scatter_sums),
            ("gather_slices", self.gather_slices),
            ("statistics", self.statistics),
            ("update", self.update),
        ]
    }
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            all_gather: self.all_gather + other.all_gather,
            reduce_scatter: self.reduce_scatter + other.reduce_scatter,
            all_reduce: self.all_reduce + other.all_reduce,
            scatter_sums: self.scatter_sums + other.scatter_sums,
            gather_slices: self.gather_slices + other.gather_slices,
            statistics: self.statistics + other.statistics,
            update: self.update + other.update,
        }
    }
}

impl Mul<u64> for Traffic {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self {
            all_gather: self.all_gather * times,
            reduce_scatter: self.reduce_scatter * times,
            all_reduce: self.all_reduce * times,
            scatter_sums: self.scatter_sums * times,
            gather_slices: self.gather_slices * times,
            statistics: self.statistics * times,
            update: self.update * times,
        }
    }
}

pub(super) fn of(plan: &Plan, rank: Rank, microbatches: u64) -> Traffic {
    let gather = |unit| all_gather(plan, unit, rank);
    let all_gathers: Flow = plan.gathers().iter().map(|entry| gather(entry.unit)).sum();
    let reduce_scatters: Flow =
        plan.reductions().iter().map(|&unit| reduce_scatter(plan, unit)).sum();
    let (all_reduces, scatters, slices) = if plan.divides_state() {
        (Flow::NONE, scatter_sums(plan, rank), gather_slices(plan, rank))
    } else {
        let reductions = plan.reductions().iter();
        let all_reduces = reductions.map(|&unit| all_reduce(plan, unit, rank)).sum();
        (all_reduces, Flow::NONE, Flow::NONE)
    };

    let once = microbatches.min(1);
    let (scatter_times, reduce_times) = match plan.options().accumulation {
        Accumulation::ReduceScatter => (microbatches, once),
        Accumulation::Every => (microbatches, microbatches),
        Accumulation::Local => (once, once),
    };
    Traffic {
        all_gather: all_gathers * microbatches,
        reduce_scatter: reduce_scatters * scatter_times,
        all_reduce: all_reduces * reduce_times,
        scatter_sums: scatters * reduce_times,
        gather_slices: slices * once,
        statistics: statistics(plan, rank) * microbatches,
        update: plan.update(rank).flow() * once,
    }
}

fn all_gather(plan: &Plan, unit: UnitId, rank: Rank) -> Flow {
    let shard = ElemCount::of(plan.layout(unit).shard_len()).bytes(plan.compute_dtype(unit));
    match plan.options().full_copies {
        FullCopies::PerRank => from_peers(plan, Axis::Shard, shard),
        FullCopies::PerProcess if plan.mesh().world_size() == 1 => Flow::NONE,
        FullCopies::PerProcess if rank.index() > 0 => Flow::call(ByteCount::ZERO),
        FullCopies::PerProcess => Flow::call(shard * (plan.mesh().shard_size() as u64 - 1)),
    }
}

fn reduce_scatter(plan: &Plan, unit: UnitId) -> Flow {
    let shard = ElemCount::of(plan.layout(unit).trainable().shard_len);
    from_peers(plan, Axis::Shard, shard.bytes(plan.options().reduce_dtype))
}

fn all_reduce(plan: &Plan, unit: UnitId, rank: Rank) -> Flow {
    let len = plan.layout(unit).trainable().shard_len;
    let index = plan.mesh().coordinate(rank).on(Axis::Replicate);
    let own = ElemCount::of(balanced(len, plan.mesh().replicate_size(), index).len());
    match from_peers(plan, Axis::Replicate, own.bytes(plan.options().reduce_dtype)) {
        Flow::NONE => Flow::NONE,
        Flow { calls, bytes } => {
            let finished = (ElemCount::of(len) - own).bytes(DType::F32);
            Flow { calls, bytes: bytes + finished }
        }
    }
}

/// Returns the reduce-scatters of the sums of all units, if replicas divide state.
fn scatter_sums(plan: &Plan, rank: Rank) -> Flow {
    let slices = plan.updates().elements(plan.updater(rank));
    let peers = plan.mesh().replicate_size() as u64 - 1;
    let bytes = slices.bytes(plan.options().reduce_dtype) * peers;
    Flow { calls: plan.reductions().len() as u64, bytes }
}

/// Returns the gathers of the slices of all units, if replicas divide state.
fn gather_slices(plan: &Plan, rank: Rank) -> Flow {
    let updates = plan.updates();
    let slices = updates.elements(plan.updater(rank));
    let rounded = updates.rounded(plan.updater(rank));
    let all = |&unit: &UnitId| {
        let trainable = ElemCount::of(plan.layout(unit).trainable().shard_len);
        trainable.bytes(plan.compute_dtype(unit))
    };
    let all: ByteCount = plan.reductions().iter().map(all).sum();
    // Both dtypes of 16 bits have the same size.
    let own = rounded.bytes(DType::BF16) + (slices - rounded).bytes(DType::F32);
    Flow { calls: plan.reductions().len() as u64, bytes: all - own }
}

/// Returns the flow of the statistics of a microbatch.
fn statistics(plan: &Plan, rank: Rank) -> Flow {
    let world = plan.mesh().world_size();
    let all = plan.spec().units().iter().flat_map(|unit| &unit.statistics);
    let flow = |elements: usize| {
        let own = ElemCount::of(balanced(elements, world, rank.index()).len());
        let finished = (ElemCount::of(elements) - own).bytes(DType::F64);
        match world as u64 - 1 {
            0 => Flow::NONE,
            peers => Flow::call(own.bytes(DType::F64) * peers + finished),
        }
    };
    let both = |each: &Statistics| {
        [Phase::Forward, Phase::Backward].map(|phase| flow(each.elements(phase))).into_iter().sum()
    };
    all.map(both).sum()
}

/// One call over `axis` in which each other member sends `bytes`; none where there is no other
/// member.
fn from_peers(plan: &Plan, axis: Axis, bytes: ByteCount) -> Flow {
    match plan.mesh().axis_size(axis) as u64 - 1 {
        0 => Flow::NONE,
        peers => Flow::call(bytes * peers),
    }
}
