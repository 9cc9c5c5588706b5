//! Host buffers and the arithmetic of hsdp: what happens to numbers between an autograd and a wire.
//!
//! Parameters are cast, gradients divided, rounded, summed and settled, norms taken, optimizers stepped: each is a
//! function on slices. They do not communicate, start no thread, and know of no rank but as a label under which
//! [`memory`] is counted. Their results depend on their arguments alone: not on alignment, nor on the width of the
//! machine's vectors, nor on how a caller cuts a range (but for [`squared_norm`], a sum over the range that it is given).
//!
//! | concept | PyTorch's word | here |
//! | --- | --- | --- |
//! | a buffer whose dtype is a value | tensor | [`HostBuffer`], lent as [`Values`] and [`ValuesMut`] |
//! | the same, read by several at once | | [`SharedBuffer`] |
//! | a gradient lent by an autograd | `param.grad` | [`GradientValues`] |
//! | copy-in of a reduction | `foreach_reduce_scatter_copy_in` | [`contribute`], [`pack`] |
//! | accumulation | `partial_reduce_output` | [`settle`] with [`Fold::Add`] |
//! | both, of few members; the former, of a few at once | | [`sum_contributions`], [`contribute_all`] |
//! | divide factors | `_get_gradient_divide_factors` | [`Divisor`], [`scaled_copy`], [`divide_in_place`] |
//! | `reduce_dtype` | the same | [`Wire`] |
//! | mixed-precision cast | `all_gather_input.to(param_dtype)` | [`cast`], [`unpack`] |
//! | clipping and overflow checks | `clip_grad_norm_`, `_amp_foreach_non_finite_check_and_unscale_` | [`squared_norm`], [`first_non_finite`] |
//! | updates | `torch.optim` | [`adamw`], [`sgd`] |
//! | the same, with division and cast in one pass | `fused=True`, `grad_scale` | [`update_in_blocks`] |
//! | reductions of collectives | `ReduceOp` | [`reduce_elements`], [`average_elements`] |
//! | an output that threads fill together | | [`DisjointVec`], [`DisjointBuffer`] |
//! | peak memory, measured | `torch.cuda.max_memory_allocated` | [`memory`] |
//!
//! Two members reduce a gradient over a bf16 wire, and the result is added to a partial sum:
//!
//! ```
//! use hsdp_kernels::{Divisor, Fold, Values, Wire, contribute, settle};
//!
//! let (first, second) = (vec![1.0_f32, 3.0], vec![2.0_f32, 1.0 + 1e-4]);
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
//! In reading order: `element`, `values`, `buffer`, `gradient` (what is computed on); `divisor`, `wire`, `round` (how
//! numbers change); `simd`, `map` (how a loop becomes vector code); `accumulate`, `contributions`, `convert`, `scale`, `inspect`, `reduce`,
//! `optimizer` (the kernels); `disjoint`, [`memory`]; `cuda` (with the feature of that name: the same on a GPU).

mod accumulate;
mod buffer;
mod contributions;
mod convert;
#[cfg(feature = "cuda")]
pub mod cuda;
mod disjoint;
mod divisor;
mod element;
mod error;
mod float16;
mod gradient;
mod inspect;
mod map;
pub mod memory;
mod number;
mod optimizer;
mod reduce;
mod round;
mod scale;
mod simd;
mod stream;
mod values;
mod wire;

pub use accumulate::{Fold, Scaling, contribute, settle};
pub use buffer::{HostBuffer, SharedBuffer, zeros};
pub use contributions::{FUSED, contribute_all, sum_contributions};
pub use convert::{cast, pack, unpack};
pub use disjoint::{DisjointBuffer, DisjointVec};
pub use divisor::Divisor;
pub use element::{Element, Real};
pub use error::Error;
pub use gradient::GradientValues;
pub use inspect::{first_non_finite, squared_norm};
pub use optimizer::{AdamWStep, FusedUpdate, MomentumKind, SgdStep, adamw, sgd, update_in_blocks};
pub use reduce::{ReduceOp, average_elements, reduce_elements};
pub use scale::{divide_in_place, scaled_copy};
pub use stream::{copy_all_past_caches, copy_past_caches};
pub use values::{Values, ValuesMut};
pub use wire::Wire;
