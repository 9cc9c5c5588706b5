//! The plan of a step: everything about it that is known before it runs.

mod fingerprint;
mod memory;
mod options;
mod owners;
mod schedule;
mod slices;
mod state;
mod traffic;
mod update;
mod updaters;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

pub use self::memory::MemoryPlan;
pub use self::options::{Accumulation, FullCopies, Offload, PlanOptions, StateOver};
pub use self::owners::{Owners, Part, WholeMatrix, Wholes};
pub use self::schedule::Gather;
use self::schedule::Schedule;
pub use self::traffic::{Flow, Traffic};
pub use self::update::UpdatePlan;
use self::update::Updates;
use crate::check::MAX_ELEMENTS;
use crate::{
    BufferId, ByteCount, DType, Error, Mesh, ModelSpec, Phase, Piece, Rank, UnitId, UnitLayout,
};

/// The layouts, the collective schedule and the exact costs of a step.
///
/// A plan is a pure function of model, mesh and options. Ranks with equal inputs get equal plans,
/// and they compare the [`fingerprint`](Self::fingerprint) to check it.
///
/// ```text
/// one microbatch of three units, the second kept after its forward
///
/// gathers     forward 0, 1, 2   backward 2, 0        reductions  2, 1, 0
///
/// one step of two microbatches, accumulation reduce-scatter
///
/// shard axis      gathers  reductions  gathers  reductions
/// replicate axis                                            all-reduce 2, 1, 0
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    spec: ModelSpec,
    mesh: Mesh,
    options: PlanOptions,
    layouts: Vec<Arc<UnitLayout>>,
    schedule: Schedule,
    fingerprint: u64,
    /// Computed when it is first needed: a plan whose replicas divide state has numbers for each
    /// rank.
    updates: Arc<OnceLock<Updates>>,
}

impl Plan {
    /// Plans the steps of `spec` on `mesh`.
    ///
    /// # Errors
    /// - The errors of [`ModelSpec::validate`] and [`UnitLayout::new`].
    /// - [`Error::UnsupportedDType`] if `param_dtype` or `reduce_dtype` is not f32, f16 or bf16.
    /// - [`Error::SharedCopies`] for [`StateOver::World`] with [`FullCopies::PerProcess`].
    /// - [`Error::InvalidStorage`] if a parameter is stored in another dtype than the compute dtype
    ///   of its unit.
    /// - [`Error::TooLarge`] if all units together take more than 2^48 elements.
    pub fn new(spec: ModelSpec, mesh: Mesh, options: PlanOptions) -> Result<Self, Error> {
        spec.validate()?;
        check_dtype("param_dtype", options.param_dtype)?;
        check_dtype("reduce_dtype", options.reduce_dtype)?;
        if options.state == StateOver::World && options.full_copies == FullCopies::PerProcess {
            return Err(Error::SharedCopies);
        }
        spec.params().try_for_each(|(id, param)| {
            param.check_gathered_in(options.compute_dtype(&spec[id.unit]))
        })?;
        let layout = |unit| UnitLayout::new(unit, mesh.shard_size()).map(Arc::new);
        let layouts = spec.units().iter().map(layout).collect::<Result<Vec<_>, _>>()?;
        check_size(&layouts)?;
        let fingerprint = fingerprint::of(&spec, mesh, &options, &layouts);
        let schedule = Schedule::of(&spec, spec.unit_ids().collect());
        let updates = Arc::default();
        Ok(Self { spec, mesh, options, layouts, schedule, fingerprint, updates })
    }

    /// The same plan for a forward that uses the units in another order: only the schedule changes,
    /// and with it the memory of gathered parameters. Ids of units, layouts and the
    /// [`fingerprint`](Self::fingerprint) stay as declared.
    ///
    /// # Panics
    /// If `order` does not have each unit once.
    #[must_use]
    pub fn in_order(&self, order: &[UnitId]) -> Self {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(self.spec.unit_ids()), "{order:?} is no order of all units");
        Self { schedule: Schedule::of(&self.spec, order.to_vec()), ..self.clone() }
    }

    /// The description of the model.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The mesh of the plan.
    #[must_use]
    pub const fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// The options of the plan.
    #[must_use]
    pub const fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// Returns the compute dtype of a unit, in which it is gathered: its own if it
    /// [declares](crate::Unit::compute_in) one, or `param_dtype`.
    ///
    /// # Panics
    /// If the model has no such unit.
    #[must_use]
    pub fn compute_dtype(&self, unit: UnitId) -> DType {
        self.options.compute_dtype(&self.spec[unit])
    }

    /// The layout of a unit over its shard group. It is the same in every shard group.
    ///
    /// # Panics
    /// If the model has no such unit.
    #[must_use]
    pub fn layout(&self, unit: UnitId) -> &Arc<UnitLayout> {
        &self.layouts[unit.index()]
    }

    /// The layouts of all units, in the declared order.
    #[must_use]
    pub fn layouts(&self) -> &[Arc<UnitLayout>] {
        &self.layouts
    }

    /// A hash of the plan: equal plans have equal fingerprints, and different plans almost
    /// certainly have different ones. It is the 64-bit xxh3 of a canonical encoding of model, mesh,
    /// options and layouts, and the same on every platform. Of the optimizer
    /// [state](crate::Param::state) of parameters it has the blocks of 8-bit state, which
    /// [slices](Self::slice) follow.
    #[must_use]
    pub const fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// All units in the order of the forward: as declared, unless the plan is [in another
    /// order](Self::in_order).
    #[must_use]
    pub fn order(&self) -> &[UnitId] {
        &self.schedule.order
    }

    /// A hash of the [order](Self::order), the 64-bit xxh3 of the units' ids, and the same on every
    /// platform.
    #[must_use]
    pub fn order_digest(&self) -> u64 {
        fingerprint::of_order(&self.schedule.order)
    }

    /// The gathers of one microbatch in the order of issue: all units for the forward, then the
    /// resharded units for the backward, last unit first.
    #[must_use]
    pub fn gathers(&self) -> &[Gather] {
        &self.schedule.gathers
    }

    /// The units that are reduced in one microbatch, in the order of issue: all units with a
    /// trainable parameter, last unit first. All-reduces go in the same order.
    #[must_use]
    pub fn reductions(&self) -> &[UnitId] {
        &self.schedule.reductions
    }

    /// Returns the units in the order of updates: all units with a trainable parameter, first unit
    /// first. So slices that the next forward needs first are gathered first.
    pub fn update_order(&self) -> impl Iterator<Item = UnitId> {
        self.reductions().iter().rev().copied()
    }

    /// Numbers, for each reduction, of the gathers of the microbatch that come before it, where
    /// gathers and reductions are one sequence. A reduction follows the gathers that are issued
    /// when its unit's turn comes in the backward: of the units after it in the forward, of the
    /// unit itself, and of units that are prefetched.
    #[must_use]
    pub fn gathers_before_reductions(&self) -> Vec<usize> {
        self.schedule.gathers_before(&self.spec, self.options.prefetch)
    }

    /// The calls of `rank`, and the bytes that it receives, in one step of `microbatches`
    /// microbatches. [`Traffic`] has the formulas.
    ///
    /// # Panics
    /// If `rank` is not in the mesh, or if a count exceeds `u64::MAX`.
    #[must_use]
    pub fn traffic(&self, rank: Rank, microbatches: u64) -> Traffic {
        traffic::of(self, rank, microbatches)
    }

    /// The peak memory of each category in a step, in bytes, of a model in host memory. `shard`,
    /// `optimizer` and `update` are each of the rank with the most. All others are the same on
    /// every rank, except that with [`FullCopies::PerProcess`] rank 0 alone holds `full`.
    /// [`MemoryPlan`] has the formulas.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn memory(&self) -> MemoryPlan {
        memory::of(self)
    }

    /// The peak device memory of each category in a step, in bytes, of a model that lies on a
    /// device. Units are padded there. The categories are of the same ranks as in
    /// [`memory`](Self::memory). The buffers in which collectives put data on the wire are not
    /// included.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn memory_on_device(&self, offload: Offload) -> MemoryPlan {
        memory::on_device(self, offload)
    }

    /// The peak of gathered parameters in one half of a microbatch, in bytes. The larger of the two
    /// halves is [`MemoryPlan::full`].
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn full_in(&self, phase: Phase) -> ByteCount {
        memory::full_in(self, phase)
    }

    /// The peak of gathered parameters in one half of a microbatch, in bytes, of a model that lies
    /// on a device. The larger of the two halves is the `full` of
    /// [`memory_on_device`](Self::memory_on_device).
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn full_in_on_device(&self, phase: Phase) -> ByteCount {
        memory::full_in_on_device(self, phase)
    }

    /// The host memory of each category, in bytes, of a model that lies on a device: the offloaded
    /// parts, those for the update of one unit at a time, and the model's buffers. Each category is
    /// of the rank with the most. With [`Offload::None`] all are 0 but `update` and `buffers`.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn memory_offloaded(&self, offload: Offload) -> MemoryPlan {
        memory::offloaded(self, offload)
    }

    /// Returns the bytes of the f32 masters of `rank`, of a model in host memory. In units that
    /// compute in f32 these are whole shards, which gathers read. In units that compute in 16 bits
    /// they are the elements that the rank [updates](Self::updated), and the frozen elements that
    /// have an f32 master. The maximum over all ranks is [`MemoryPlan::shard`].
    ///
    /// A model on a device has the same masters there with [`Offload::None`] and
    /// [`Offload::Optimizer`]. With [`Offload::All`] they are
    /// [`masters_offloaded`](Self::masters_offloaded).
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    #[must_use]
    pub fn masters(&self, rank: Rank) -> ByteCount {
        memory::masters(self, rank)
    }

    /// Returns the bytes of the f32 masters that `rank` keeps in host memory for a model on a
    /// device with [`Offload::All`]. No gather reads them, so in all units they are the elements
    /// that the rank [updates](Self::updated), and the frozen elements. The maximum over all ranks
    /// is the `shard` of [`memory_offloaded`](Self::memory_offloaded).
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    #[must_use]
    pub fn masters_offloaded(&self, rank: Rank) -> ByteCount {
        memory::masters_offloaded(self, rank)
    }

    /// The bytes of optimizer state that `rank` keeps: [`State`](crate::State) has the formulas,
    /// and each average has an f32 for each element that the rank [updates](Self::updated), with
    /// its padding. The maximum over all ranks is [`MemoryPlan::optimizer`].
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    #[must_use]
    pub fn optimizer_state(&self, rank: Rank) -> ByteCount {
        self.updates().state(self.updater(rank))
    }

    /// The collectives of `rank` in an update: the exchange of parameters that owners update, with
    /// its memory, and the all-reduces of the sums of factored state. [`UpdatePlan`] has the
    /// formulas.
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    #[must_use]
    pub fn update(&self, rank: Rank) -> UpdatePlan {
        self.updates().of_rank(self, rank)
    }

    fn updates(&self) -> &Updates {
        self.updates.get_or_init(|| Updates::of(self))
    }

    /// The pieces of all parameters that a rank holds, without padding, in the order of units and
    /// of the shard buffers.
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    #[must_use]
    pub fn pieces_of(&self, rank: Rank) -> Vec<(UnitId, Piece)> {
        state::pieces_of(self, rank)
    }

    /// Returns the slice of a rank in the trainable part of the shard that it holds of a unit: a
    /// range of elements of the shard. Replicas hold the same shards. Each has a slice of its own,
    /// which it writes to checkpoints and counts in norms, so all ranks together have every
    /// trainable element once.
    ///
    /// Slices begin at the places nearest to even ones where they may be cut. These are multiples
    /// of 8 elements, and in a piece multiples of the row group or block of its parameter
    /// ([`Granularity`](crate::Granularity)) and of the block of its 8-bit [state](crate::State),
    /// counted from its start. A slice may be empty.
    ///
    /// # Panics
    /// If the model has no such unit, or the rank is not in the mesh.
    #[must_use]
    pub fn slice(&self, unit: UnitId, rank: Rank) -> Range<usize> {
        slices::slice(self, unit, rank)
    }

    /// Returns whether replicas divide optimizer state among them: with [`StateOver::World`] and
    /// several replicas.
    #[must_use]
    pub fn divides_state(&self) -> bool {
        self.options.state == StateOver::World && self.mesh.replicate_size() > 1
    }

    /// Returns the elements of a unit's shard that a rank updates, and for which it keeps optimizer
    /// state: its [slice](Self::slice) if replicas [divide](Self::divides_state) state, and
    /// otherwise the whole trainable part.
    ///
    /// # Panics
    /// If the model has no such unit, or the rank is not in the mesh.
    #[must_use]
    pub fn updated(&self, unit: UnitId, rank: Rank) -> Range<usize> {
        match self.divides_state() {
            true => self.slice(unit, rank),
            false => 0..self.layout(unit).trainable().shard_len,
        }
    }

    /// Returns the pieces of trainable parameters that a rank [updates](Self::updated) in a unit's
    /// shard, in order.
    ///
    /// # Panics
    /// If the model has no such unit, or the rank is not in the mesh.
    pub fn updated_pieces(&self, unit: UnitId, rank: Rank) -> impl Iterator<Item = Piece> {
        let updated = self.updated(unit, rank);
        let shard_index = self.mesh.coordinate(rank).shard_index;
        let pieces = self.layout(unit).pieces(shard_index);
        pieces.filter_map(move |piece| state::clipped(piece, &updated))
    }

    /// Returns the number of ranks that together update each element once, and exchange whole
    /// parameters to do it: all ranks if replicas [divide](Self::divides_state) state, and
    /// otherwise those of a shard group.
    #[must_use]
    pub fn updaters(&self) -> usize {
        match self.divides_state() {
            true => self.mesh.world_size(),
            false => self.mesh.shard_size(),
        }
    }

    /// Returns the index of a rank among the [updaters](Self::updaters): its number if replicas
    /// [divide](Self::divides_state) state, and otherwise its index in the shard group.
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    #[must_use]
    pub fn updater(&self, rank: Rank) -> usize {
        let shard_index = self.mesh.coordinate(rank).shard_index;
        if self.divides_state() { rank.index() } else { shard_index }
    }

    /// Returns the pieces that a rank writes to a checkpoint: those in its [slices](Self::slice),
    /// and its part of the frozen parameters, which replicas divide evenly. All ranks together
    /// write every element once.
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    #[must_use]
    pub fn pieces_saved_by(&self, rank: Rank) -> Vec<(UnitId, Piece)> {
        state::saved_by(self, rank)
    }

    /// Returns the buffers that a rank writes to a checkpoint. Every rank holds every buffer, so
    /// the ranks take them in turn, in declared order: one rank writes a whole buffer, since most
    /// are small, and the bytes spread over the ranks.
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    #[must_use]
    pub fn buffers_saved_by(&self, rank: Rank) -> Vec<BufferId> {
        state::buffers_saved_by(self, rank).map(|(id, _)| id).collect()
    }

    /// The bytes that a rank holds for a checkpoint that is written while training goes on: a copy
    /// of the parameters, of the optimizer state and of the buffers that it writes. That is 4 · Σ
    /// len over its [pieces](Self::pieces_saved_by), 4 · (1 + averages) · Σ numel over its
    /// [buffers](Self::buffers_saved_by), and over its trainable pieces by their
    /// [state](crate::State)
    ///
    /// | state | bytes |
    /// |---|---|
    /// | `Elements(k)` | 4 · k · len |
    /// | `EightBit` | 8 · len, since codes are written as f32, and 8 for each block of which the piece has the first element |
    /// | `Muon`; `Factored` with fewer than two dims | 4 · len |
    /// | each average, of any state | 4 · len |
    ///
    /// State that belongs to no piece is written once. The rank whose slice has the parameter's
    /// first element writes 4 · count · (rows + columns) bytes of `Factored` with two dims or
    /// more. The owner writes 4 · n bytes of `Owned(n)`; if each replica has an owner, it is that
    /// of the first replica.
    ///
    /// # Panics
    /// If the rank is not in the mesh, or a count exceeds `u64::MAX`.
    #[must_use]
    pub fn snapshot(&self, rank: Rank) -> ByteCount {
        state::snapshot(self, rank)
    }
}

fn check_dtype(option: &'static str, dtype: DType) -> Result<(), Error> {
    if dtype.is_of_training() { Ok(()) } else { Err(Error::UnsupportedDType { option, dtype }) }
}

fn check_size(layouts: &[Arc<UnitLayout>]) -> Result<(), Error> {
    let elements =
        layouts.iter().fold(0u64, |sum, layout| sum.saturating_add(layout.full_len() as u64));
    if elements > MAX_ELEMENTS {
        let what = "the model".to_owned();
        return Err(Error::TooLarge { what, elements, limit: MAX_ELEMENTS });
    }
    Ok(())
}
