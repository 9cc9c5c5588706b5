//! Collectives in candle's graph. A value's type has its state on each axis of the mesh, and
//! gradients flow through the collectives.
//!
//! This module is for models that no wrapper shards: gathered negatives of a contrastive loss,
//! statistics over all ranks' batches, parallel layers of one's own. The states and the rules are
//! those of [`hsdp::dist`]; [`Candle`] records them in candle's autograd.
//!
//! | concept | PyTorch | here |
//! |---|---|---|
//! | a differentiable collective | `torch.distributed.nn.functional`, `_functional_collectives` | the methods of [`Dist`] |
//! | the loss that a gradient is of | the sum of all ranks' losses, by convention | the ranks' sum if Partial, the one loss if Invariant |
//! | gradients of DDP | hooks that average after the backward | [`gradient_of`], and an [`all_reduce`](hsdp::dist::Dist::all_reduce) |
//! | a loss that all ranks hold | counts once for each of them | does not compile: a loss is Partial or Invariant |
//! | the order of backward communication | as the autograd happens to walk | the forward's order, reversed, on all ranks |
//! | a collective that a rank's loss does not depend on | the other ranks wait for this rank | this rank takes part, with zeros |
//! | average, product, min, max of `reduce_scatter` | a wrong gradient without an error, or an error in the backward | the right gradients |
//! | integers | fail in the backward, or give no error | refused in the forward; allowed on a tape without gradients |
//!
//! The following program is data-parallel training by hand, on two ranks that are threads. A
//! parameter is Replicate: all ranks hold it, and each uses it in its own way. Each rank's loss is
//! Varying, and `to_partial` makes it a term of a sum, which is Partial. The gradient is Partial
//! too, and an all-reduce gives its sum to all ranks:
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use hsdp::dist::{OnBoth, Replicate, Sum, Varying};
//! use hsdp::{Mesh, World, WorldOptions};
//! use hsdp_candle::distributed::*;
//!
//! let rank = |world: World| -> Result<Vec<f64>, hsdp_candle::Error> {
//!     let tape = Tape::of_mesh(&world, Mesh::new(1, 2)?)?;
//!     let weight = Var::new(&[[1.0], [2.0]], &Device::Cpu)?;
//!     let weight: Dist<Replicate, Replicate> = tape.assume(weight.as_tensor().clone());
//!     let rank = world.rank().index() as f64;
//!     let x: Dist<Varying, Varying> = tape.assume(Tensor::new(&[[1.0, rank]], &Device::Cpu)?);
//!
//!     let loss = x.matmul(&weight)?.sqr()?.sum_all()?; // 1 on rank 0, 9 on rank 1
//!     let loss = loss.to_partial(OnBoth)?;
//!     let gradient = gradient_of(&loss.backward()?, &weight)?; // Dist<Partial, Partial>
//!     let gradient = gradient.all_reduce(OnBoth, Sum)?;
//!     Ok(gradient.into_tensor().flatten_all()?.to_vec1()?)
//! };
//! for gradient in hsdp::launch(2, WorldOptions::default(), rank) {
//!     assert_eq!(gradient?, [8.0, 6.0]); // of 1 + 9, the sum of both ranks' losses
//! }
//! # Ok::<(), hsdp_candle::Error>(())
//! ```
//!
//! A collective is a custom op with two parents: its input, and the collective before it. So
//! candle's backward runs every collective, in the reverse order, on every rank. Each collective
//! adds a level to candle's recursion: a tape is for one forward and backward, with thousands of
//! collectives, not with millions.
//!
//! In reading order: `carrier` (collectives as ops of candle), `functions` (functions of values),
//! and here the gradients.

mod carrier;
mod functions;

use hsdp::dist::{Axes, DistState, TapeGradients};

pub use self::carrier::Candle;
pub use self::functions::{Functions, Pairs};
use crate::error::Error;

/// A candle tensor in state `R` over the replicate axis and `S` over the shard axis.
pub type Dist<R, S> = hsdp::dist::Dist<Candle, R, S>;

/// Groups along which candle tensors communicate, and the collectives applied to them, in order.
pub type Tape = hsdp::dist::Tape<Candle>;

/// Returns the gradient of `value`, in the state of its cotangents, as [`TapeGradients::of`] does.
/// Returns zeros if this rank's loss does not depend on `value`. Not collective.
///
/// A gradient for an all-reduce must exist on all ranks, also on a rank with an empty batch.
///
/// # Errors
/// [`hsdp::Error::Collective`] if there is no gradient and `value` is not a variable: candle keeps
/// the gradients of variables only. [`Error::Candle`] if candle fails.
pub fn gradient_of<R: DistState, S: DistState>(
    gradients: &TapeGradients<Candle>,
    value: &Dist<R, S>,
) -> Result<Dist<R::Cotangent, S::Cotangent>, Error> {
    if let Some(gradient) = gradients.of(value) {
        return Ok(gradient);
    }
    let tensor = value.tensor();
    if tensor.is_variable() {
        return Ok(gradients.tape().assume(tensor.zeros_like()?));
    }
    let what = format!(
        "the tensor {:?} of {} is not a variable, and candle keeps the gradients of \
         variables only",
        tensor.shape(),
        tensor.dtype().as_str()
    );
    let rank = value.tape().group(Axes::Both).rank();
    Err(hsdp::Error::Collective { operation: "gradient_of", rank, what }.into())
}
