//! Trains models written in [candle](candle_core) on [hsdp]. Parameters are sharded over ranks,
//! gathered for the forward and the backward of their unit, and freed in between. The gradients of
//! a unit are reduced as soon as they are complete. Models that no wrapper shards can use
//! collectives with gradients: [`distributed`].
//!
//! candle has no hooks and is not patched: custom ops drive the sharding, and others carry the
//! collectives. The crate does not wrap modules: a forward is written against small traits,
//! [`Units`] and [`Parameters`], and runs sharded on a [`Pass`] or whole on [`Plain`]. It makes its
//! layers with their own constructors, from a [`var_builder`]. The crate `hsdp-models` has models,
//! and layers of transformers with gradients, which candle-nn lacks. This crate supports the CPU,
//! and GPUs with the feature `candle-cuda`.
//!
//! | concept | PyTorch FSDP2 | here |
//! |---|---|---|
//! | the parameters, grouped into units to shard | `fully_shard(module, mesh)` | [`hsdp::ModelSpec`] |
//! | the sharded model | `FSDPModule` | [`hsdp::ShardedModel`] |
//! | the module's forward | `forward` with pre- and post-forward hooks | [`UnitsExt::unit`] |
//! | activation checkpointing | `checkpoint_wrapper` | [`UnitsExt::recomputed`] |
//! | evaluation | `model.eval()`, `torch.no_grad()` | [`hsdp::Evaluation`], [`Pass::finish`] |
//! | `loss.backward()` | pre-backward hooks, gradient-ready hooks | [`Pass::backward`] |
//! | `x.grad` of a tensor that is no parameter | `x.grad` | [`Pass::gradient_of`] |
//! | a module without FSDP | the plain module | [`Plain`] |
//! | a differentiable collective | `torch.distributed.nn.functional` | [`distributed::Dist`] |
//! | layers and models | `torch.nn.functional`, `torchtitan`, `transformers` | the crate `hsdp-models` |
//!
//! [`prelude`] has the names of a training loop, including those of [`hsdp::prelude`]. The
//! following program trains a linear model on two ranks that are threads. The runtime begins and
//! ends the step, and candle runs the microbatch.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use hsdp_candle::prelude::*;
//!
//! let train = |world: World| -> Result<f64, hsdp_candle::Error> {
//!     let weight = Param::new("weight", [1, 3]);
//!     let bias = Param::new("bias", [1]);
//!     let spec = ModelSpec::new().unit(Unit::new("linear").param(weight).param(bias));
//!     let halves = |param: &Param| vec![0.5; param.numel()];
//!     let options = ModelOptions::on(Mesh::new(1, 2)?);
//!     let mut model = ShardedModel::new(world, spec, options, halves)?;
//!     let mut adamw = AdamW::new(&model, AdamWOptions::default());
//!     let x = Tensor::new(&[[1f32, 2., 3.], [4., 5., 6.]], &Device::Cpu)?;
//!
//!     let mut step = model.begin_step(StepOptions::microbatches(1))?;
//!     let pass = Pass::new(step.microbatch()?)?;
//!     let y = pass.unit("linear", &x, |p, x| {
//!         x.matmul(&p.get("weight")?.t()?)?.broadcast_add(&p.get("bias")?)
//!     })?;
//!     pass.backward(&y.sqr()?.mean_all()?, 2)?;
//!     let gradients = step.finish()?;
//!     let loss = gradients.loss();
//!     adamw.step(&mut model, gradients.clip(1.0))?;
//!     Ok(loss)
//! };
//! for loss in hsdp::launch(2, WorldOptions::default(), train) {
//!     assert_eq!(loss?, 38.125); // the mean of the squares of 3.5 and 8
//! }
//! # Ok::<(), hsdp_candle::Error>(())
//! ```
//!
//! # Models with constructors
//!
//! A model whose constructors take a `VarBuilder` is not rewritten. [`record`] finds its
//! parameters, without memory for them, and groups them into units. Each unit's forward makes its
//! own layers. Here the backward runs the blocks again instead of keeping their tensors
//! ([`UnitsExt::recomputed`]):
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use candle_nn::{Embedding, Linear, Module, VarBuilder, embedding, linear};
//! use hsdp_candle::prelude::*;
//!
//! // The model: candle code, as it is.
//! struct Block(Linear, Linear);
//!
//! impl Block {
//!     fn load(vb: VarBuilder) -> candle_core::Result<Self> {
//!         Ok(Self(linear(4, 16, vb.pp("up"))?, linear(16, 4, vb.pp("down"))?))
//!     }
//!
//!     fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
//!         x + self.1.forward(&self.0.forward(x)?.silu()?)?
//!     }
//! }
//!
//! # #[allow(dead_code)]
//! struct Model {
//!     embed: Embedding,
//!     blocks: Vec<Block>,
//! }
//!
//! impl Model {
//!     fn load(vb: VarBuilder) -> candle_core::Result<Self> {
//!         let blocks = vec![Block::load(vb.pp("h.0"))?, Block::load(vb.pp("h.1"))?];
//!         Ok(Self { embed: embedding(10, 4, vb.pp("embed"))?, blocks })
//!     }
//! }
//!
//! // Its forward, unit by unit.
//! fn forward(units: &dyn Units, tokens: &Tensor) -> candle_core::Result<Tensor> {
//!     let mut x = units.unit("embed", tokens, |p, tokens| {
//!         embedding(10, 4, var_builder(p).pp("embed"))?.forward(tokens)
//!     })?;
//!     for name in ["h.0", "h.1"] {
//!         let block = move |p: &dyn Parameters, x: &Tensor| {
//!             Block::load(var_builder(p).pp(name))?.forward(x)
//!         };
//!         x = units.recomputed(name, &x, block)?;
//!     }
//!     units.output(&x)
//! }
//!
//! let recorded = record(Model::load)?;
//! let spec = recorded.spec(&["embed", "h.*"])?;
//! assert_eq!(spec.units()[1].name, "h.0");
//! let train = |world: World| -> Result<f64, hsdp_candle::Error> {
//!     let options = ModelOptions::on(Mesh::new(2, 2)?);
//!     let mut model = ShardedModel::new(world, spec.clone(), options, recorded.init(42))?;
//!     let mut step = model.begin_step(StepOptions::microbatches(1))?;
//!     let pass = Pass::new(step.microbatch()?)?;
//!     let tokens = Tensor::new(&[3_u32, 1, 4, 1], &Device::Cpu)?;
//!     pass.backward(&forward(&pass, &tokens)?.sqr()?.mean_all()?, 4)?;
//!     Ok(step.finish()?.norm())
//! };
//! for norm in hsdp::launch(4, WorldOptions::default(), train) {
//!     assert!(norm? > 0.0);
//! }
//! # Ok::<(), hsdp_candle::Error>(())
//! ```
//!
//! In reading order: `model` (the traits), `builder`, `recorded` (models with constructors),
//! `plain`, `pass` (implementations of the traits), [`layer`] (layers whose gradients do not pass
//! through candle), `ops` (the custom ops that candle calls),
//! `unit` (the state of a unit in a microbatch, and its uses), `statistics` (sums of a batch over
//! all ranks), `variables` (the variables that a loss depends on), `recompute`, `storage`,
//! `gradient`, `cuda` (moving and lending buffers), `error`; [`distributed`].

#![cfg_attr(not(feature = "candle-cuda"), forbid(unsafe_code))]

mod builder;
mod convert;
#[cfg(feature = "candle-cuda")]
mod cuda;
pub mod distributed;
mod error;
mod gradient;
pub mod layer;
mod model;
mod ops;
mod pass;
mod plain;
pub mod prelude;
mod recompute;
mod recorded;
mod statistics;
mod storage;
mod unit;
mod variables;
mod zeros;

pub use builder::var_builder;
pub use convert::{candle_dtype, device};
pub use error::{DeclarationError, Error, LostGradients};
pub use gradient::Gradient;
pub use model::{Forward, ForwardMode, Parameters, RepeatableForward, UnitInputs, Units, UnitsExt};
pub use pass::Pass;
pub use plain::Plain;
pub use recorded::{Recorded, record};
pub use statistics::BatchStatistics;
pub use variables::VariableGradient;
