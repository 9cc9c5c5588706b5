//! Trains models written in [candle](candle_core) on [hsdp]. Parameters are sharded over ranks,
//! gathered for the forward and the backward of their unit, and freed in between. The gradients of a
//! unit are reduced as soon as they are complete. Models that no wrapper shards can use collectives
//! with gradients: [`distributed`].
//!
//! candle has no hooks and is not patched: three custom ops drive the sharding, and three more carry
//! the collectives. The crate does not wrap modules: a model is written against two small traits,
//! [`Units`] and [`Parameters`], and runs sharded on a [`Pass`] or whole on [`Plain`]. Layers of
//! transformers with gradients, which candle-nn lacks, are in [`nn`]. It supports the CPU, and with the
//! feature `candle-cuda` GPUs.
//!
//! | concept | PyTorch FSDP2 | here |
//! |---|---|---|
//! | the parameters, grouped into units to shard | `fully_shard(module, mesh)` | [`hsdp::ModelSpec`] |
//! | the sharded model | `FSDPModule` | [`hsdp::ShardedModel`] |
//! | the module's forward | `forward` with pre- and post-forward hooks | [`Pass::unit`] |
//! | `loss.backward()` | pre-backward hooks, gradient-ready hooks | [`Pass::backward`] |
//! | a module without FSDP | the plain module | [`Plain`] |
//! | a differentiable collective | `torch.distributed.nn.functional` | [`distributed::Dist`] |
//! | layers | `torch.nn.functional` | [`nn`] |
//! | an example model | `torchtitan` | [`gpt`] |
//!
//! A linear model on two ranks that are threads. The runtime begins and ends the step; candle runs
//! the microbatch:
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use hsdp::prelude::*;
//! use hsdp_candle::Pass;
//!
//! let losses = hsdp::world(2, |world| -> Result<f64, hsdp_candle::Error> {
//!     let (weight, bias) = (Param::new("weight", [1, 3]), Param::new("bias", [1]));
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
//! });
//! for loss in losses {
//!     assert_eq!(loss?, 38.125); // the mean of the squares of 3.5 and 8
//! }
//! # Ok::<(), hsdp_candle::Error>(())
//! ```
//!
//! In reading order: `model` (the two traits), `plain`, `pass` (their implementations), `ops` (the custom
//! ops that candle calls), `usage`, `unit` (the state of a unit in a microbatch), `gathered`, `storage`,
//! `gradient`, `cuda` (moving and lending buffers), `error`; [`distributed`]; [`nn`]; [`gpt`].

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
pub mod nn;
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
