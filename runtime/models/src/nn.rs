//! Layers with gradients, of transformers above all.
//!
//! candle-nn has fused norms, softmax and rotary embeddings, but these have no backward: a model
//! that trains with them silently loses gradients. The layers here have a backward. On the CPU the
//! forward and the backward are one pass over memory each, except for [`linear`] and [`attention`],
//! which are products of matrices. A backward needs only the inputs, which the graph keeps in any
//! case, and computes gradients only of inputs that candle tracks.
//!
//! **Gradients.** On the CPU gradients between layers do not pass through candle, which would add
//! each of them to zeros: they are summed in f32, in place, in all dtypes of tensors
//! ([`hsdp_candle::layer`]). Ops of candle between two layers, but for reshapes, cost what they do
//! in candle, so a residual sum is better written as [`add`].
//!
//! | function | PyTorch |
//! |---|---|
//! | [`linear`], [`embedding`] | the functions of `torch.nn.functional` with these names |
//! | [`rms_norm`], [`layer_norm`] | the functions of `torch.nn.functional` with these names |
//! | [`batch_norm`] | `torch.nn.SyncBatchNorm`, `torch.nn.BatchNorm2d` |
//! | [`padded_embedding`] | `torch.nn.functional.embedding` with `padding_idx` |
//! | [`softmax`] | `torch.softmax(x, dim=-1)` |
//! | [`softmax_of_scores`] | `softmax` of `products * scale + mask`, with a cap before the mask |
//! | [`attention`], [`attention_packed`] | `scaled_dot_product_attention`; a cap as in Gemma 2 |
//! | [`rope`] | `apply_rotary_pos_emb` of transformers' Phi-3, whole or partial |
//! | [`rope_interleaved`] | `rope` in the layout of GPT-J |
//! | [`soft_cap`] | `cap * torch.tanh(x / cap)` |
//! | [`cross_entropy`] | `torch.nn.functional.cross_entropy(..., reduction="sum")` |
//! | [`gelu`] | `torch.nn.functional.gelu(x, approximate="tanh")` |
//! | [`add`] | `a + b` |
//! | [`silu_mul`], [`gelu_mul`] | `silu(gate) * up`, `gelu(gate, approximate="tanh") * up` |
//!
//! **Dtypes.** Inputs are f32, bf16 or f16; labels and ids are whole numbers. Arithmetic and sums
//! are in f32, and each result is rounded once, except by products of bf16. A gradient that leaves
//! the layers, to an op of candle or to the reduction of a parameter, is rounded to the dtype of
//! its tensor. On the CPU [`linear`] and [`attention`] multiply bf16 if their inputs and weights
//! are bf16: they round the gradients of their outputs to it, and attention its shares and the
//! gradients of its products of queries and keys. Weights and tables may have another dtype than
//! the input.
//!
//! **Bits.** On the CPU, rows are computed in parallel on rayon's pool, like candle's matmul,
//! except for [`embedding`]. The results do not depend on the number of threads, and exponentials
//! and hyperbolic tangents do not depend on the system's mathematical library. Products use the
//! widest vectors of the processor, and its instructions for bf16 ([`hsdp_kernels::matmul`]): on
//! one machine each run gives the same bits, and other processors may give others.
//!
//! **Devices.** Tensors that are not on the CPU go to the function of the same name in
//! [`composed`], which is made of candle's ops.
//!
//! **Errors.** A layer refuses unsupported shapes and dtypes with an error that names the layer.
//! The functions are not collective, except [`batch_norm`].

mod activations;
mod attention;
mod batch_norm;
pub mod composed;
mod cross_entropy;
mod element;
mod embedding;
mod factors;
mod layer;
mod linear;
mod norms;
mod rope;
mod rows;
mod scores;

pub use activations::{add, gelu, gelu_mul, silu_mul, soft_cap};
pub(crate) use attention::BLOCK;
pub use attention::{attention, attention_packed};
pub use batch_norm::{BatchNormOptions, batch_norm};
pub use cross_entropy::{CrossEntropy, IGNORED, cross_entropy};
pub use embedding::{embedding, padded_embedding};
pub use linear::linear;
pub use norms::{layer_norm, rms_norm};
pub use rope::{rope, rope_interleaved};
pub use scores::{Mask, Scores, softmax, softmax_of_scores};
