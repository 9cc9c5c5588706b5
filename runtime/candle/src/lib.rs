//! Trains models written in [candle](candle_core) on [hsdp]: parameters are sharded over ranks,
//! gathered for the forward and the backward of their unit, freed in between, and their gradients
//! are reduced as they come. For what no wrapper shards there are collectives with gradients:
//! [`distributed`].
//!
//! candle has no hooks and is not patched: three custom ops do it all, and three more the
//! collectives. It does not wrap modules: a model is written against two small traits, [`Units`] and
//! [`Parameters`], and runs sharded on a [`Pass`] or whole on [`Plain`]. It serves the CPU, and with the
//! feature `candle-cuda` GPUs.
//!
//! | concept | PyTorch FSDP2 | here |
//! |---|---|---|
//! | what is sharded, and how | `fully_shard(module, mesh)` | [`hsdp::ModelSpec`] |
//! | the sharded model | `FSDPModule` | [`hsdp::ShardedModel`] |
//! | the module's forward | `forward` with pre- and post-forward hooks | [`Pass::unit`] |
//! | `loss.backward()` | pre-backward hooks, gradient-ready hooks | [`Pass::backward`] |
//! | a module without FSDP | the plain module | [`Plain`] |
//! | a differentiable collective | `torch.distributed.nn.functional` | [`distributed::Dist`] |
//! | a model to try it on | `torchtitan` | [`gpt`] |
//!
//! A linear model on two ranks that are threads. A step begins and ends in the runtime; the
//! microbatch is candle's:
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use hsdp::*;
//! use hsdp_candle::Pass;
//!
//! let losses = hsdp::world(2, |world| -> Result<f64, hsdp_candle::Error> {
//!     let (weight, bias) = (Param::new("weight", [1, 3]), Param::new("bias", [1]));
//!     let spec = ModelSpec::new().unit(Unit::new("linear").param(weight).param(bias));
//!     let mesh = Mesh::new(1, 2).map_err(hsdp::Error::from)?;
//!     let halves = |param: &Param| vec![0.5; param.numel()];
//!     let mut model = ShardedModel::new(world, spec, ModelOptions::on(mesh), halves)?;
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
//! });
//! for loss in losses {
//!     assert_eq!(loss?, 38.125); // the mean of the squares of 3.5 and 8
//! }
//! # Ok::<(), hsdp_candle::Error>(())
//! ```
//!
//! In reading order: `model` (what a model asks for), `plain`, `pass` (who gives it), `ops` (where
//! candle calls us), `usage`, `unit` (what is where, and what is still to come), `gathered`, `storage`,
//! `gradient`, `cuda` (moving and lending without a copy, or with one), `error`; [`distributed`]; [`gpt`].

#![cfg_attr(not(feature = "candle-cuda"), forbid(unsafe_code))]

#[cfg(feature = "candle-cuda")]
mod cuda;
pub mod distributed;
mod dtype;
mod error;
mod gathered;
pub mod gpt;
mod gradient;
mod model;
mod ops;
mod pass;
mod plain;
mod storage;
mod unit;
mod usage;

pub use dtype::candle_dtype;
pub use error::Error;
pub use model::{Forward, Parameters, Units};
pub use pass::Pass;
pub use plain::Plain;
