//! Peak memory of a step, by category.

use std::ops::Range;

use super::update::Updates;
use super::updaters::alike;
use super::{Accumulation, FullCopies, Gather, Offload, Plan};
use crate::{AfterForward, ByteCount, DType, ElemCount, Phase, Rank, UnitId, UnitLayout};

/// The peak memory of one rank in each category during a step, in bytes. `shard`, `optimizer` and
/// `update` are the maximum over all ranks; the others are the same on every rank.
///
/// In these formulas `shard_len` is the number of elements of a unit's shard, and n the number of
/// trainable ones among them, and `updated` that of the elements that a rank
/// [updates](Plan::updated): n, unless replicas [divide](Plan::divides_state) state. `numel` is the
/// number of elements of a unit's parameters without padding, and `size` the bytes of an element in
/// the unit's [compute dtype](Plan::compute_dtype). `master_len` is n in units whose frozen
/// parameters are [stored](crate::Param::stored_in) in the compute dtype, and `shard_len` in all
/// others:
///
/// | category | bytes |
/// |---|---|
/// | `shard` | max over ranks of [`Plan::masters`], 4 · Σ m: m is master_len in units that compute in f32, where gathers read the masters, and updated + master_len - n in units that compute in 16 bits |
/// | `gather_input` | Σ size · shard_len over the units that compute in 16 bits |
/// | `optimizer` | max over ranks of [`Plan::optimizer_state`], which depends on the [states](crate::State) of parameters |
/// | `update` | max over ranks of [`UpdatePlan::extra`](crate::UpdatePlan), 0 without parameters that owners update, or whose state is factored |
/// | `partial` | 4 · Σ n; with accumulation `Every` and more than one replica twice that |
/// | `grad_full` | with accumulation `Local` 4 · Σ numel of trainable parameters, otherwise 0 |
/// | `full` | max over i of live(i) |
/// | `buffers` | 4 · (2 + [averages](crate::ModelSpec::averaged)) · Σ numel of [buffers](crate::Param::buffer): as the last step left them, as the present one has written them, and their averages |
///
/// ```text
/// live(i) = Σ size · numel of gathers[i ..= i + prefetch]     (as far as the microbatch goes)
///         + Σ size · numel of the kept units before gathers[i].unit, in the order of the forward
/// ```
///
/// With [`FullCopies::PerProcess`] rank 0 holds `full` for all ranks, and the other ranks hold
/// none. The sum then goes on to `end(end(i))`, where end(j) = j + prefetch + 1, or the end of the
/// microbatch if that is nearer. The gathers of the next microbatch follow those of this one. In a
/// world of one rank the formula is that of [`FullCopies::PerRank`].
///
/// A model with stored parameters cannot lie on a device. On a device a unit lies flat, with its
/// padding ([`Plan::memory_on_device`]). The formula of `full` then uses `full_len` in place of
/// `numel`. That of `grad_full` uses the length of the trainable region with its padding: the sum
/// over all units, and once more the largest, because a gradient is packed before it is added.
///
/// Offloaded buffers ([`Offload`]) move from the device to the host, which updates one unit at a
/// time ([`Plan::memory_offloaded`]):
///
/// | offload | less on the device | more on the device | on the host |
/// |---|---|---|---|
/// | `Optimizer` | all of `optimizer` and of `update` | | `optimizer`, `update`; `shard` 4 · max copied, `partial` 4 · max updated |
/// | `All` | all of `optimizer`, of `update` and of `shard` | `gather_input` 4 · Σ shard_len over the units that compute in f32, which gathers read | `optimizer`, `update`; `shard` max over ranks of [`Plan::masters_offloaded`], 4 · Σ (updated + master_len - n) over all units; `partial` 4 · max updated, and for each of bf16 and f16 `gather_input` 2 · max copied over the units that compute in it |
///
/// The maxima are over units and ranks. `copied` is `updated` if replicas divide state, and
/// otherwise `shard_len`.
///
/// The reason for the formula of `full`: a rank that needs the i-th of [`Plan::gathers`] issues it
/// and the next `prefetch`, and a gather takes memory from its issue on. Memory grows with issues
/// only, so the peak comes right after one. A resharded unit's memory is free after each use (later
/// gathers reuse its buffers, within this bound), so of the gathers before the i-th only kept units
/// remain. In the forward these are all kept units before it; in the backward they are the kept
/// units whose backward is still to come. Both are the kept units that come earlier in the
/// [order](Plan::order) of the forward. The last unit of the forward is resharded and gathered
/// again like all others: with a gather ahead, both of its copies take memory for a time.
///
/// Where ranks share a copy, the slowest rank may still read the i-th. It has issued `prefetch`
/// more, so rank 0 may have released all of these, need the next one, and have issued `prefetch`
/// beyond that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemoryPlan {
    /// f32 master copies of the shards, on the rank with the most, except frozen parameters that
    /// are [stored](crate::Param::stored_in) in the compute dtype. In units that compute in 16 bits
    /// these are only the elements that the rank updates, and the frozen ones.
    pub shard: ByteCount,
    /// The shards in the compute dtype, which gathers read; 0 where gathers read the master copies.
    pub gather_input: ByteCount,
    /// Gathered parameters, at the peak of a microbatch.
    pub full: ByteCount,
    /// Unsharded f32 gradients that accumulate from microbatch to microbatch.
    pub grad_full: ByteCount,
    /// f32 sums of reduce-scatter outputs; with `Every` and more than one replica also the outputs
    /// of the microbatch, which are all-reduced before they are added.
    pub partial: ByteCount,
    /// State of the optimizer, on the rank with the most.
    pub optimizer: ByteCount,
    /// Matrices that are exchanged and updated as a whole, and sums of factored state, on the rank
    /// with the most.
    pub update: ByteCount,
    /// [Buffers](crate::Param::buffer) as the last step left them, as the present one has written
    /// them, and their averages.
    pub buffers: ByteCount,
}

impl MemoryPlan {
    /// Returns the bytes of each category, by its name.
    #[must_use]
    pub const fn categories(&self) -> [(&'static str, ByteCount); 8] {
        [
            ("shard", self.shard),
            ("gather_input", self.gather_input),
            ("full", self.full),
            ("grad_full", self.grad_full),
            ("partial", self.partial),
            ("optimizer", self.optimizer),
            ("update", self.update),
            ("buffers", self.buffers),
        ]
    }

    /// The sum over all categories, an upper bound of the memory at any time: categories may peak
    /// at different times.
    ///
    /// # Panics
    /// If the sum exceeds `u64::MAX`.
    #[must_use]
    pub fn total(&self) -> ByteCount {
        let of_step = self.full + self.grad_full + self.partial + self.update;
        self.shard + self.gather_input + self.optimizer + self.buffers + of_step
    }
}

pub(super) fn of(plan: &Plan) -> MemoryPlan {
    let grad_full = plan.spec().units().iter().map(|unit| unit.trainable_numel()).sum();
    MemoryPlan {
        optimizer: optimizer(plan),
        update: update(plan),
        buffers: buffers(plan),
        ..of_step(plan, &full_of(plan), grad_full)
    }
}

/// Returns the state of the optimizer, on the rank with the most.
fn optimizer(plan: &Plan) -> ByteCount {
    plan.updates().most_state()
}

/// Returns the memory of an update in host memory, on the rank with the most.
fn update(plan: &Plan) -> ByteCount {
    plan.updates().most(Updates::extra)
}

/// Returns the bytes of both copies of the buffers and of their averages, which lie on the host.
fn buffers(plan: &Plan) -> ByteCount {
    plan.spec().buffer_numel().bytes(DType::F32) * (2 + plan.spec().averages() as u64)
}

/// Returns the bytes of a rank's masters of a model that is not offloaded.
pub(super) fn masters(plan: &Plan, rank: Rank) -> ByteCount {
    masters_with(plan, plan.updates().rounded(plan.updater(rank)))
}

/// Returns the bytes of masters of a rank that updates `rounded` elements of units that compute in
/// 16 bits.
fn masters_with(plan: &Plan, rounded: ElemCount) -> ByteCount {
    let others = |unit| match plan.compute_dtype(unit) {
        DType::F32 => ElemCount::of(plan.layout(unit).master_len()),
        _ => frozen_masters(plan.layout(unit)),
    };
    let others: ElemCount = plan.spec().unit_ids().map(others).sum();
    (rounded + others).bytes(DType::F32)
}

/// Returns the bytes of a rank's masters that are offloaded.
pub(super) fn masters_offloaded(plan: &Plan, rank: Rank) -> ByteCount {
    offloaded_with(plan, plan.updates().elements(plan.updater(rank)))
}

/// Returns the bytes of offloaded masters of a rank that updates this number of elements.
fn offloaded_with(plan: &Plan, updated: ElemCount) -> ByteCount {
    (updated + sum(plan, frozen_masters)).bytes(DType::F32)
}

/// Returns the number of frozen elements of a shard that have an f32 master.
fn frozen_masters(layout: &UnitLayout) -> ElemCount {
    ElemCount::of(layout.master_len() - layout.trainable().shard_len)
}

/// Returns the bytes of a gathered unit, whose parameters have a buffer each.
fn full_of(plan: &Plan) -> impl Fn(UnitId) -> ByteCount {
    |unit| plan.spec()[unit].numel().bytes(plan.compute_dtype(unit))
}

/// Returns the bytes of a gathered unit that lies flat, with its padding, as on a device.
fn flat_of(plan: &Plan) -> impl Fn(UnitId) -> ByteCount {
    |unit| ElemCount::of(plan.layout(unit).full_len()).bytes(plan.compute_dtype(unit))
}

/// Returns the bytes of a unit's shard in its compute dtype.
fn compute_shard(plan: &Plan, unit: UnitId) -> ByteCount {
    shard_len(plan.layout(unit)).bytes(plan.compute_dtype(unit))
}

/// The memory on a device.
pub(super) fn on_device(plan: &Plan, offload: Offload) -> MemoryPlan {
    let flat = flat(plan);
    match offload {
        Offload::None => {
            let update = plan.updates().most(|it, updater| it.extra_with_device(updater)[1]);
            MemoryPlan { optimizer: optimizer(plan), update, ..flat }
        }
        Offload::Optimizer => flat,
        Offload::All => {
            let gather_input = plan.spec().unit_ids().map(|unit| compute_shard(plan, unit)).sum();
            MemoryPlan { shard: ByteCount::ZERO, gather_input, ..flat }
        }
    }
}

/// The memory on the host of a model on a device.
pub(super) fn offloaded(plan: &Plan, offload: Offload) -> MemoryPlan {
    let trained = || plan.reductions().iter().copied();
    let through = || MemoryPlan {
        optimizer: optimizer(plan),
        update: update(plan),
        partial: most(trained(), |unit| most_updated(plan, unit)).bytes(DType::F32),
        buffers: buffers(plan),
        ..MemoryPlan::default()
    };
    match offload {
        Offload::None => {
            let update = plan.updates().most(|it, updater| it.extra_with_device(updater)[0]);
            MemoryPlan { update, buffers: buffers(plan), ..MemoryPlan::default() }
        }
        Offload::Optimizer => {
            let shard = most(trained(), |unit| most_copied(plan, unit)).bytes(DType::F32);
            MemoryPlan { shard, ..through() }
        }
        Offload::All => {
            let [elements, _] = plan.updates().most_elements();
            let shard = offloaded_with(plan, elements);
            let gather_input =
                OFFLOADED_COPIES.into_iter().map(|dtype| offloaded_copy(plan, dtype)).sum();
            MemoryPlan { shard, gather_input, ..through() }
        }
    }
}

/// Dtypes of the rounded copies that the host makes of offloaded masters.
const OFFLOADED_COPIES: [DType; 2] = [DType::BF16, DType::F16];

/// Returns the bytes of the rounded copy on the host of the largest part of a shard that computes
/// in `dtype`.
fn offloaded_copy(plan: &Plan, dtype: DType) -> ByteCount {
    let units = plan.spec().unit_ids().filter(|unit| plan.compute_dtype(*unit) == dtype);
    most(units, |unit| most_copied(plan, unit)).bytes(dtype)
}

/// Returns the number of elements of a unit's shard that are copied between host and device in an
/// update, on the rank with the most.
fn most_copied(plan: &Plan, unit: UnitId) -> ElemCount {
    match plan.divides_state() {
        true => most_updated(plan, unit),
        false => shard_len(plan.layout(unit)),
    }
}

/// Returns the number of elements of a unit that a rank updates, on the rank with the most.
fn most_updated(plan: &Plan, unit: UnitId) -> ElemCount {
    let updated = |run: Range<usize>| plan.updated(unit, Rank::new(run.start)).len();
    most(alike(plan, unit).into_iter(), |run| ElemCount::of(updated(run)))
}

/// Returns the largest of some numbers of elements.
fn most<T>(all: impl Iterator<Item = T>, elements: impl Fn(T) -> ElemCount) -> ElemCount {
    all.map(elements).max().unwrap_or(ElemCount::ZERO)
}

/// Returns the memory of a step of a model whose units lie flat, with their padding, as on a
/// device.
fn flat(plan: &Plan) -> MemoryPlan {
    let trainable = |layout: &UnitLayout| ElemCount::of(layout.trainable().len);
    let added = plan.layouts().iter().map(|layout| trainable(layout)).max();
    of_step(plan, &flat_of(plan), sum(plan, trainable) + added.unwrap_or(ElemCount::ZERO))
}

/// Computes the formulas without `optimizer` and `update`, for `full` bytes of a gathered unit and
/// `unsharded` elements of gradients that accumulate unsharded.
fn of_step(plan: &Plan, full: &dyn Fn(UnitId) -> ByteCount, unsharded: ElemCount) -> MemoryPlan {
    let f32_bytes = |elements: ElemCount| elements.bytes(DType::F32);
    let trainable = sum(plan, trainable_shard);
    let transient = match plan.options().accumulation {
        Accumulation::Every if plan.mesh().replicate_size() > 1 => trainable,
        Accumulation::ReduceScatter | Accumulation::Every | Accumulation::Local => ElemCount::ZERO,
    };
    let grad_full = match plan.options().accumulation {
        Accumulation::Local => unsharded,
        Accumulation::ReduceScatter | Accumulation::Every => ElemCount::ZERO,
    };
    let [_, rounded_elements] = plan.updates().most_elements();
    let rounded = |unit: &UnitId| plan.compute_dtype(*unit) != DType::F32;
    let rounded = plan.spec().unit_ids().filter(rounded);
    MemoryPlan {
        shard: masters_with(plan, rounded_elements),
        gather_input: rounded.map(|unit| compute_shard(plan, unit)).sum(),
        full: peak_full(plan, full),
        grad_full: f32_bytes(grad_full),
        partial: f32_bytes(trainable + transient),
        ..MemoryPlan::default()
    }
}

fn sum(plan: &Plan, elements: impl Fn(&UnitLayout) -> ElemCount) -> ElemCount {
    plan.layouts().iter().map(|layout| elements(layout)).sum()
}

fn shard_len(layout: &UnitLayout) -> ElemCount {
    ElemCount::of(layout.shard_len())
}

fn trainable_shard(layout: &UnitLayout) -> ElemCount {
    ElemCount::of(layout.trainable().shard_len)
}

/// The peak of `full` in one half of a microbatch.
pub(super) fn full_in(plan: &Plan, phase: Phase) -> ByteCount {
    most_in(plan, &full_of(plan), phase)
}

/// The peak of `full` on a device in one half of a microbatch.
pub(super) fn full_in_on_device(plan: &Plan, phase: Phase) -> ByteCount {
    most_in(plan, &flat_of(plan), phase)
}

/// At its begin a backward holds the kept units and those that were gathered ahead. From there
/// memory grows with issues only.
fn most_in(plan: &Plan, full: &dyn Fn(UnitId) -> ByteCount, phase: Phase) -> ByteCount {
    let live = live_full(plan, full);
    let (forward, backward) = live.split_at(plan.spec().units().len());
    let most = |live: &[ByteCount]| live.iter().max().copied().unwrap_or(ByteCount::ZERO);
    let last = plan.gathers()[forward.len() - 1].unit;
    let freed = match plan.spec()[last].after_forward {
        AfterForward::Reshard | AfterForward::Discard => full(last),
        AfterForward::Keep => ByteCount::ZERO,
    };
    match phase {
        Phase::Forward => most(forward),
        Phase::Backward => most(backward).max(forward[forward.len() - 1] - freed),
    }
}

/// Computes the formula of `full`; the function `full` returns the bytes of a gathered unit.
fn peak_full(plan: &Plan, full: &dyn Fn(UnitId) -> ByteCount) -> ByteCount {
    live_full(plan, full).into_iter().max().unwrap_or(ByteCount::ZERO)
}

/// The formula of `live` for each gather.
fn live_full(plan: &Plan, full: &dyn Fn(UnitId) -> ByteCount) -> Vec<ByteCount> {
    let kept = kept_before(plan, full);
    let before = MemoryPrefix::of(plan, full);
    let live = |(asked, gather): (usize, &Gather)| {
        let end = match plan.options().full_copies {
            FullCopies::PerRank => before.end_of_issues(asked, plan.options().prefetch),
            FullCopies::PerProcess if plan.mesh().world_size() == 1 => {
                before.end_of_issues(asked, plan.options().prefetch)
            }
            FullCopies::PerProcess => before.end_of_shared(asked, plan.options().prefetch),
        };
        before.sum(asked, end) + kept[gather.unit.index()]
    };
    plan.gathers().iter().enumerate().map(live).collect()
}

/// Sums over the gathers of two microbatches in a row.
struct MemoryPrefix {
    /// The bytes of the first i gathers, for i from 0 to all of two microbatches.
    sums: Vec<ByteCount>,
}

impl MemoryPrefix {
    fn of(plan: &Plan, full: &dyn Fn(UnitId) -> ByteCount) -> Self {
        let twice = plan.gathers().iter().chain(plan.gathers());
        let mut sums = vec![ByteCount::ZERO];
        for gather in twice {
            sums.push(sums[sums.len() - 1] + full(gather.unit));
        }
        Self { sums }
    }

    /// The number of gathers of one microbatch.
    fn len(&self) -> usize {
        self.sums.len() / 2
    }

    fn sum(&self, from: usize, to: usize) -> ByteCount {
        self.sums[to] - self.sums[from]
    }

    /// The index behind the last gather that is issued when gather `asked` is needed, in its
    /// microbatch.
    fn end_of_issues(&self, asked: usize, prefetch: usize) -> usize {
        let microbatch = if asked < self.len() { self.len() } else { 2 * self.len() };
        microbatch.min(asked.saturating_add(prefetch).saturating_add(1))
    }

    /// The same index for the rank that is as far ahead as possible of a rank that needs gather
    /// `asked`.
    fn end_of_shared(&self, asked: usize, prefetch: usize) -> usize {
        self.end_of_issues(self.end_of_issues(asked, prefetch), prefetch)
    }
}

/// Returns for each unit the bytes of the kept units before it in the order of the forward.
fn kept_before(plan: &Plan, full: &dyn Fn(UnitId) -> ByteCount) -> Vec<ByteCount> {
    let mut before = vec![ByteCount::ZERO; plan.order().len()];
    let mut sum = ByteCount::ZERO;
    for &unit in plan.order() {
        before[unit.index()] = sum;
        if plan.spec()[unit].after_forward == AfterForward::Keep {
            sum += full(unit);
        }
    }
    before
}
