//! A hybrid-sharded data-parallel (HSDP, FSDP) training runtime that a Rust training binary embeds.
//!
//! Parameters, gradients and optimizer state are split over a 2-D mesh, *replicate x shard*. Each
//! microbatch reduce-scatters its gradients over the shard axis; the partial results accumulate in
//! f32; one all-reduce over the replicate axis ends the step. It knows no autograd: any code may
//! compute gradients (`hsdp-candle` is the adapter for candle). It writes no files but
//! [checkpoints](checkpoint).
//!
//! | concept | PyTorch FSDP2 | here |
//! |---|---|---|
//! | the model, and how it is sharded | `fully_shard(module, mesh)` | [`ModelSpec`], [`Mesh`], [`Plan`] |
//! | the sharded model | `FSDPModule` | [`ShardedModel`] |
//! | one optimizer update's worth of microbatches | `set_requires_all_reduce`, `set_is_last_backward` | [`Step`] |
//! | one forward and backward | hooks | [`Pass`], [`PassHandle`] |
//! | a gathered unit | unsharded parameters | [`Full`] |
//! | a reduced gradient | `sharded_param.grad` | [`Gradients`] |
//! | norms of each parameter | `get_total_norm` of a DTensor | [`Norms`], [`Histograms`] |
//! | averages | divide factors | [`Objective`], [`divide`] |
//! | dtypes | `MixedPrecisionPolicy` | [`Precision`], [`Unit::compute_in`], [`LossScaling`] |
//! | optimizers | `torch.optim` on DTensors | [`AdamW`], [`Sgd`] |
//! | checkpoints | `torch.distributed.checkpoint` | [`checkpoint`] |
//!
//! One step of a linear model, on two ranks that are threads:
//!
//! ```
//! use hsdp::prelude::*;
//!
//! let losses = hsdp::launch(2, WorldOptions::default(), |world| -> Result<f64, hsdp::Error> {
//!     let spec = ModelSpec::new().unit(Unit::new("linear").param(Param::new("w", [4])));
//!     let options = ModelOptions::on(Mesh::new(1, 2)?);
//!     let rank = world.rank().index();
//!     let mut model = ShardedModel::new(world, spec, options, |_| vec![1.0; 4])?;
//!     let mut sgd = Sgd::new(&model, SgdOptions::default());
//!     let linear = model.plan().spec().unit_ids().next().expect("one unit");
//!
//!     let mut step = model.begin_step(StepOptions::microbatches(1))?;
//!     let mut pass = step.microbatch()?;
//!     let full = pass.unshard(linear)?;
//!     let x = [0.0, 1.0, 2.0, rank as f32];
//!     let w = full.as_f32(0).expect("an f32 model");
//!     let loss: f32 = w.iter().zip(x).map(|(w, x)| w * x).sum();
//!     let seed = pass.loss(LossSum::new(f64::from(loss), 1))?.value() as f32;
//!     let gradient: Vec<f32> = x.iter().map(|x| x * seed).collect();
//!     pass.reduce(linear, UnitGradients::of([gradient]))?;
//!     pass.finish()?;
//!     let gradients = step.finish()?;
//!     let loss = gradients.loss();
//!     sgd.step(&mut model, gradients.clip(1.0))?;
//!     Ok(loss)
//! });
//! for loss in losses {
//!     assert_eq!(loss?, 3.5); // the mean of 3 and 4, on both ranks
//! }
//! # Ok::<(), hsdp::Error>(())
//! ```
//!
//! [`prelude`] has the names of a training loop (with candle, `hsdp_candle::prelude`), [`testing`]
//! the faults and delays that a test injects. A program depends on this crate alone: the daily
//! names of the crates below are here, and their whole contents are in [`sharding`], [`kernels`],
//! [`comm`] and [`checkpoint::format`].
//!
//! The modules stand on floors, and a module imports only from floors below its own. From the
//! lowest floor on, which is also an order in which to read them:
//!
//! | floor | contents |
//! |---|---|
//! | `error` | [`Error`], and the types inside of its variants |
//! | `options` | the values that a program sets, such as [`ModelOptions`] and [`Objective`] |
//! | `state` | the parts of a rank's model: plan and groups, shards, sums, buffers, the device |
//! | `agree` | the records that ranks exchange, and the conclusions that they draw from them |
//! | `step` | [`Step`], [`Pass`], [`Gradients`]: the gathers and reductions of a step |
//! | `model` | [`ShardedModel`], [`Evaluation`], norms and clipping |
//! | `persist` | the way in which state goes into a checkpoint and comes back |
//! | `optimizer` | [`Optimizer`], the optimizers, and [`Ema`] |
//! | [`checkpoint`] | saves and loads |
//!
//! `autograd`, with [`collective`] and [`dist`], stands beside them, over `error` alone.

mod agree;
mod autograd;
pub mod checkpoint;
mod error;
mod model;
mod optimizer;
mod options;
mod persist;
pub mod prelude;
mod state;
mod step;
pub mod testing;

pub use autograd::{collective, dist};
pub use error::gradients::{NonFiniteGradient, Origin};
pub use error::{DataError, Error, GradientError};
pub use model::MeasuredUpdate;
pub use model::ShardedModel;
pub use model::evaluation::Evaluation;
pub use model::gradients::Norm;
pub use model::norms::{ByParameter, Norms};
pub use model::norms::{Histogram, Histograms};
#[doc(hidden)]
pub use optimizer::RuleExchange;
pub use optimizer::ema::Ema;
pub use optimizer::{
    Adafactor, AdafactorOptions, AdamW, AdamWOptions, ClippedGradient, DeviceRun, Grouped, Lion,
    LionOptions, Muon, MuonOptions, Optimizer, RateScale, Rule, Run, RunState, Selected, Setting,
    Sgd, SgdOptions, Update, Updating, Whole, WholeParameters,
};
pub use options::allowed::{Allowed, LearningRate};
pub use options::divide;
pub use options::objective::{LossSum, Objective, Seed};
pub use options::placement::Placement;
pub use options::precision::{DynamicScale, LossScaling, Precision};
pub use options::{
    EndOfRun, Input, ModelOptions, NonFinite, Samples, Shutdown, StepOptions, Supply, Uneven,
    UnitOrder, Unused,
};
pub use state::context::ModelId;
pub use state::events::Event;
pub use state::full::Full;
pub use state::gradients::UnitGradients;
pub use step::gradients::{Gradients, Verdict};
pub use step::{NextStep, Pass, PassHandle, Step};

// The names of the crates below that users write down; the whole crates follow.
/// The error of a collective, inside [`Error::Comm`].
pub use hsdp_comm::Error as CommError;
#[cfg(feature = "mpi")]
pub use hsdp_comm::mpi;
pub use hsdp_comm::{
    AbortReason, CallError, Channel, Explanation, FlightRecord, Group, Launched, Launcher,
    LedgerSnapshot, Lent, ModelLabel, ModelName, Op, Pending, RankFailure, Reduction, Rendezvous,
    SetupError, Stage, StepFailure, Tag, Workers, World, WorldError, WorldOptions, explain, launch,
};
#[cfg(feature = "nccl")]
pub use hsdp_comm::{control, nccl};
pub use hsdp_kernels::{GradientValues, HostBuffer, MomentumKind, Values, memory};
pub use hsdp_sharding::{
    Accumulation, Axis, BufferId, BufferRule, ByteCount, DType, ElemCount, Flow, FullCopies,
    MemoryPlan, Mesh, ModelSpec, Offload, Param, ParamId, Phase, Piece, Plan, Rank, State,
    StateOver, Traffic, Unit, UnitId,
};

pub use hsdp_warnings::silence_warnings;

pub use hsdp_comm as comm;
pub use hsdp_kernels as kernels;
pub use hsdp_sharding as sharding;
