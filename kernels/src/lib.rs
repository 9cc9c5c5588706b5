//! Host buffers and the arithmetic of hsdp on parameters, gradients and optimizer state.
//!
//! Casts, divisions, roundings, sums, norms and optimizer updates are functions on slices. They do
//! not communicate, start no thread, and use a rank only as a label under which [`memory`] is
//! counted. Their results depend on their arguments alone: not on alignment, not on the width of
//! the machine's vectors, and not on how a caller cuts a range (except that [`squared_norm`] is a
//! sum over the range that it is given). [`matmul`] and [`NewtonSchulz`] are different: they may use
//! rayon's threads, and their bits depend on the processor.
//!
//! | concept | PyTorch's word | here |
//! | --- | --- | --- |
//! | a buffer whose dtype is known at run time | tensor | [`HostBuffer`], borrowed as [`Values`] and [`ValuesMut`] |
//! | such a buffer with several owners | | [`SharedBuffer`] |
//! | a gradient that an autograd lends | `param.grad` | [`GradientValues`], [`read_once`] |
//! | copy-in of a reduction | `foreach_reduce_scatter_copy_in` | [`contribute`], [`pack`] |
//! | accumulation | `partial_reduce_output` | [`settle`] with [`Fold::Add`] |
//! | copy-in and accumulation of all members; copy-in of several members | | [`sum_contributions`], [`contribute_all`] |
//! | divide factors | `_get_gradient_divide_factors` | [`Divisor`], [`scaled_copy`], [`divide_in_place`] |
//! | `reduce_dtype` | the same | [`Wire`] |
//! | mixed-precision cast | `all_gather_input.to(param_dtype)` | [`cast`], [`unpack`] |
//! | clipping and overflow checks | `clip_grad_norm_`, `_amp_foreach_non_finite_check_and_unscale_` | [`squared_norm`], [`first_non_finite`] |
//! | updates | `torch.optim` | [`adamw`], [`lion`], [`sgd`] |
//! | an update with state of 8 bits an element | `AdamW8bit` of bitsandbytes | [`adamw_8bit`], [`EightBit`] |
//! | the orthogonalization of Muon | `torch.optim.Muon` | [`NewtonSchulz`] |
//! | an update with factored second moments, in pieces | `torch.optim.Adafactor` | [`adafactor`] |
//! | an update with division and cast in one pass | `fused=True`, `grad_scale` | [`update_in_blocks`] |
//! | reductions of collectives | `ReduceOp` | [`reduce_elements`], [`average_elements`] |
//! | a copy that bypasses the caches | | [`copy_past_caches`], [`copy_all_past_caches`] |
//! | products of matrices | `torch.matmul` | [`matmul`] or [`product`] of a [`Matrix`] and another |
//! | loops of another crate with this machine's vectors | | [`vectorized`] |
//! | an output that several threads fill | | [`DisjointVec`], [`DisjointBuffer`] |
//! | a new output, whose memory is written once | `torch.empty` | [`FreshVec`], [`product`] |
//! | peak memory, measured | `torch.cuda.max_memory_allocated` | [`memory`] |
//!
//! This example reduces the gradients of two members over a bf16 wire, and adds the result to a
//! partial:
//!
//! ```
//! use hsdp_kernels::{Divisor, Fold, Values, Wire, contribute, settle};
//!
//! let first = vec![1.0_f32, 3.0];
//! let second = vec![2.0_f32, 1.0 + 1e-4];
//! let mut sum = [0.0; 2];
//! contribute(&mut sum, Values::F32(&first), Divisor::ONE, Wire::BF16, Fold::Replace);
//! contribute(&mut sum, Values::F32(&second), Divisor::ONE, Wire::BF16, Fold::Add);
//!
//! let mut partial = [10.0, 10.0];
//! settle(&mut partial, &sum, Divisor::new(2.0)?, Fold::Add);
//! assert_eq!(partial, [11.5, 12.0]); // 1.0001 was rounded to 1 on its way
//! # Ok::<(), hsdp_kernels::Error>(())
//! ```
//!
//! Modules in reading order, each with imports of earlier ones only: `error`, `values`, `buffer`
//! (the operands); `round`, `simd`, `float16`, `map` (vector code); `number`, `element` (the
//! elements of collectives); `divisor`, `wire` (division and rounding); `convert`, `accumulate`,
//! `inspect`, `contributions`, `scale`, `reduce`, `stream`, `matmul`, `optimizer` (the kernels);
//! `disjoint`, `fresh`, [`memory`]; [`cuda`] (the same arithmetic on a GPU); `gradient` (gradients
//! that an autograd lends, in host or device memory).

mod accumulate;
mod buffer;
mod contributions;
mod convert;
pub mod cuda;
mod disjoint;
mod divisor;
mod element;
mod error;
mod float16;
mod fresh;
mod gradient;
mod inspect;
mod map;
mod matmul;
pub mod memory;
mod number;
mod optimizer;
mod reduce;
mod round;
mod scale;
mod simd;
mod stream;
#[cfg(test)]
mod tests;
mod values;
mod wire;

pub use self::accumulate::{Fold, Scaling, contribute, pack, settle};
pub use self::buffer::{HostBuffer, SharedBuffer, zeros};
pub use self::contributions::{FUSED, contribute_all, sum_contributions};
pub use self::convert::{cast, unpack};
pub use self::disjoint::{DisjointBuffer, DisjointVec};
pub use self::divisor::Divisor;
pub use self::element::{Element, Real};
pub use self::error::Error;
pub use self::fresh::{FreshPart, FreshVec};
pub use self::gradient::{GradientValues, read_once};
pub use self::inspect::{first_non_finite, squared_distance, squared_norm};
pub use self::matmul::{Matrix, Threads, matmul, multiplies_bf16, product};
pub use self::optimizer::{
    AdamWStep, EIGHT_BIT_BLOCK, EightBit, FusedUpdate, LionStep, MatrixDType, MomentumKind,
    MuonStep, NewtonSchulz, SgdStep, UPDATE_BLOCK, adafactor, adamw, adamw_8bit, lion, muon,
    muon_direction, sgd, update_in_blocks,
};
pub use self::reduce::{ReduceOp, average_elements, reduce_elements};
pub use self::scale::{divide_in_place, scaled_copy};
pub use self::simd::vectorized;
pub use self::stream::{copy_all_past_caches, copy_past_caches};
pub use self::values::{Values, ValuesMut};
pub use self::wire::Wire;
