//! Everything about a step that is known before it runs.

mod fingerprint;
mod memory;
mod offload;
mod options;
mod saved;
mod schedule;
mod traffic;

use std::sync::Arc;

pub use self::memory::MemoryPlan;
pub use self::offload::Offload;
pub use self::options::{Accumulation, FullCopies, PlanOptions};
pub use self::schedule::{Gather, Phase};
pub use self::traffic::{Flow, Traffic};
use crate::layout::MAX_ELEMENTS;
use crate::{ByteCount, DType, Error, Mesh, ModelSpec, Piece, Rank, UnitId, UnitLayout};

/// The layouts, the collective schedule and the exact costs of a step.
///
/// A pure function of model, mesh and options: ranks that plan the same get the same, and
/// [`fingerprint`](Self::fingerprint) tells whether they did.
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
    gathers: Vec<Gather>,
    reductions: Vec<UnitId>,
    fingerprint: u64,
}

impl Plan {
    /// Plans the steps of `spec` on `mesh`.
    ///
    /// # Errors
    /// - What [`ModelSpec::validate`] and [`UnitLayout::new`] refuse.
    /// - [`Error::UnsupportedDType`] if parameters or gradients should travel in something else
    ///   than f32, f16 or bf16.
    /// - [`Error::TooLarge`] if all units together take more than 2^48 elements.
    pub fn new(spec: ModelSpec, mesh: Mesh, options: PlanOptions) -> Result<Self, Error> {
        spec.validate()?;
        check_dtype("param_dtype", options.param_dtype)?;
        check_dtype("reduce_dtype", options.reduce_dtype)?;
        let layout = |unit| UnitLayout::new(unit, mesh.shard_size()).map(Arc::new);
        let layouts = spec.units().iter().map(layout).collect::<Result<Vec<_>, _>>()?;
        check_size(&layouts)?;
        let fingerprint = fingerprint::of(&spec, mesh, &options, &layouts);
        let (gathers, reductions) = (schedule::gathers(&spec), schedule::reductions(&spec));
        Ok(Self { spec, mesh, options, layouts, gathers, reductions, fingerprint })
    }

    /// The model.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The mesh.
    #[must_use]
    pub const fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// The options.
    #[must_use]
    pub const fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// The layout of a unit over each shard group.
    ///
    /// # Panics
    /// If the model has no such unit.
    #[must_use]
    pub fn layout(&self, unit: UnitId) -> &Arc<UnitLayout> {
        &self.layouts[unit.index()]
    }

    /// The layouts of all units, in forward order.
    #[must_use]
    pub fn layouts(&self) -> &[Arc<UnitLayout>] {
        &self.layouts
    }

    /// A number that is equal on ranks with equal plans, and hardly on others: the xxh3 of a
    /// canonical encoding of model, mesh, options and layouts. The same on every platform.
    #[must_use]
    pub const fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The gathers of one microbatch in the order of issue: all units forward, then the units that
    /// were resharded backward, last first.
    #[must_use]
    pub fn gathers(&self) -> &[Gather] {
        &self.gathers
    }

    /// The units that are reduced in one microbatch (and all-reduced, when that is due) in the
    /// order of issue: those with a trainable parameter, last first.
    #[must_use]
    pub fn reductions(&self) -> &[UnitId] {
        &self.reductions
    }

    /// What `rank` receives in one step of `microbatches` microbatches: see [`Traffic`] for the
    /// formulas.
    ///
    /// # Panics
    /// If `rank` is not in the mesh, or if a count exceeds `u64::MAX`.
    #[must_use]
    pub fn traffic(&self, rank: Rank, microbatches: u64) -> Traffic {
        traffic::of(self, rank, microbatches)
    }

    /// The largest memory of each category in a step, the same on every rank, but for the one full copy of a process:
    /// see [`MemoryPlan`] for the formulas.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn memory(&self) -> MemoryPlan {
        memory::of(self)
    }

    /// The same of a model that lies on a device, where units are padded: what of it is there. What collectives put on the wire is not
    /// among it.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn memory_on_device(&self, offload: Offload) -> MemoryPlan {
        memory::on_device(self, offload)
    }

    /// What of [`MemoryPlan::full`] is reached in one half of a microbatch: the larger of both is the peak.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn full_in(&self, phase: Phase) -> ByteCount {
        memory::full_in(self, phase)
    }

    /// The same of [`memory_on_device`](Self::memory_on_device).
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn full_in_on_device(&self, phase: Phase) -> ByteCount {
        memory::full_in_on_device(self, phase)
    }

    /// What of a model that lies on a device is in the memory of the host: what is offloaded, and what one unit's update goes through.
    ///
    /// # Panics
    /// If a count exceeds `u64::MAX`.
    #[must_use]
    pub fn memory_offloaded(&self, offload: Offload) -> MemoryPlan {
        memory::offloaded(self, offload)
    }

    /// What a rank has of all parameters, in the order of units and of their shards, without padding.
    ///
    /// # Panics
    /// If the rank is not on the mesh.
    #[must_use]
    pub fn pieces_of(&self, rank: Rank) -> Vec<(UnitId, Piece)> {
        saved::pieces_in(self, rank, |len| 0..len)
    }

    /// What of it the rank writes to a checkpoint: replicas have the same shards, and each writes its part of one, so that together all
    /// ranks write every element once.
    ///
    /// # Panics
    /// If the rank is not on the mesh.
    #[must_use]
    pub fn pieces_saved_by(&self, rank: Rank) -> Vec<(UnitId, Piece)> {
        saved::saved_by(self, rank)
    }

    /// What a rank holds for a checkpoint that is written while training goes on, a copy of what it writes: 4 · (Σ len + `optimizer_slots`
    /// · Σ len of what is trained) of its [pieces](Self::pieces_saved_by).
    ///
    /// # Panics
    /// If the rank is not on the mesh, or a count exceeds `u64::MAX`.
    #[must_use]
    pub fn snapshot(&self, rank: Rank) -> ByteCount {
        saved::snapshot(self, rank)
    }
}

fn check_dtype(option: &'static str, dtype: DType) -> Result<(), Error> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(Error::UnsupportedDType { option, dtype }),
    }
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
