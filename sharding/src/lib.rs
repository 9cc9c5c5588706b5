//! The geometry of a hybrid-sharded data-parallel step: which rank holds which elements, which
//! collectives a step issues in which order, and how many bytes and how much memory they cost.
//! Everything is a pure function of the model's description, the mesh and the options, so it is
//! known, and can be checked, before anything runs.
//!
//! This crate moves no data, allocates no tensor, starts no thread and reads no clock or file. It
//! knows no collective library and no device. It does not choose the mesh or the units for best
//! speed; it computes the costs of a choice.
//!
//! | concept | PyTorch's word | here |
//! |---|---|---|
//! | a member of the world | rank | [`Rank`] |
//! | the ranks, *replicate x shard* | `DeviceMesh` | [`Mesh`], [`Axis`], [`Coordinate`] |
//! | a model's parameters | `named_parameters()` | [`ModelSpec`], [`Param`] |
//! | the parameters that are gathered together | `FSDPParamGroup` | [`Unit`], [`UnitId`] |
//! | free after forward, or not | `reshard_after_forward` | [`AfterForward`] |
//! | the elements that each rank holds | `FSDPParam`, `Shard(0)` | [`UnitLayout`], [`Piece`] |
//! | parameter and wire dtype | `MixedPrecisionPolicy` | [`PlanOptions`] |
//! | gradients of several microbatches | `set_requires_gradient_sync` | [`Accumulation`] |
//! | what an optimizer keeps | (measured) | [`State`] |
//! | matrices that one rank updates | (by hand) | [`Param::matrices`], [`Owners`] |
//! | order of the collectives | explicit prefetching | [`step`], [`Plan::gathers`], [`Plan::reductions`] |
//! | bytes moved, peak memory | (measured) | [`Traffic`], [`MemoryPlan`], [`UpdatePlan`] |
//!
//! Six ranks form two replicas of three shards. Each replica holds every unit once:
//!
//! ```text
//! mesh 2x3     shard axis ->              a unit
//! replicate    rank 0  rank 1  rank 2     full    | weight         | bias    | pad |
//! axis         rank 3  rank 4  rank 5     ranks   | 0 and 3  | 1 and 4  | 2 and 5  |
//! ```
//!
//! # Example
//!
//! ```
//! use hsdp_sharding::{Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, Unit};
//!
//! let spec = ModelSpec::new()
//!     .unit(Unit::new("embedding").param(Param::new("wte", [256, 64])))
//!     .unit(Unit::new("block").param(Param::new("w", [64, 64])).param(Param::new("b", [64])))
//!     .tie("head", "wte");
//! let plan = Plan::new(spec, Mesh::new(2, 2)?, PlanOptions::default())?;
//!
//! // Each unit forward, then each backward; gradients from the last unit to the first.
//! assert_eq!(plan.gathers().len(), 4);
//! assert_eq!(plan.reductions().len(), 2);
//!
//! // 20,544 elements: a rank holds half of them, and receives the other half in each gather.
//! assert_eq!(plan.memory().shard.get(), 4 * 20_544 / 2);
//! let traffic = plan.traffic(Rank::new(0), 3); // three microbatches
//! assert_eq!(traffic.all_gather.bytes.get(), 3 * 2 * 4 * 20_544 / 2);
//! assert_eq!(traffic.all_reduce.calls, 2); // once a step
//! # Ok::<(), hsdp_sharding::Error>(())
//! ```
//!
//! # Modules
//!
//! All modules but [`step`] are private, and their items are exported here. A module imports only
//! modules before it. In reading order: `rank`, `dtype` and `count` (basic types), `balance` (an
//! even split), `spec` (the model's description), `error`, `mesh`, `check` (of a description),
//! `layout` (places and pieces; its modules `place` and `search` implement the granularities of
//! rows and blocks), `plan` (with the modules `schedule`, `traffic`, `memory`, `options`, `owners`,
//! `slices`, `updaters`, `state`, `update` and `fingerprint`), [`step`] (the order of a step),
//! `parse` (values from text).

#![forbid(unsafe_code)]

mod balance;
mod check;
mod count;
mod dtype;
mod error;
mod layout;
mod mesh;
mod multiples;
mod parse;
mod plan;
mod rank;
mod spec;
pub mod step;

pub use self::balance::balanced;
pub use self::count::{ByteCount, ElemCount};
pub use self::dtype::DType;
pub use self::error::{BufferProblem, Error, StorageProblem, TieProblem};
pub use self::layout::{ALIGNMENT, ParamSlot, Piece, Pieces, Region, UnitLayout};
pub use self::mesh::{Axis, Coordinate, Mesh};
pub use self::plan::{
    Accumulation, Flow, FullCopies, Gather, MemoryPlan, Offload, Owners, Part, Plan, PlanOptions,
    StateOver, Traffic, UpdatePlan, WholeMatrix, Wholes,
};
pub use self::rank::Rank;
pub use self::spec::{
    AfterForward, BufferId, BufferRule, Granularity, Matrices, ModelSpec, Param, ParamId, Phase,
    Role, State, Statistics, Unit, UnitId,
};
