//! The memory of a microbatch, before it runs.

use hsdp_sharding::DType;

use super::Gpt;

/// Tensors that a block keeps: as wide as the residual stream (in widths), and of attention scores.
///
/// A norm keeps 5 widths, `attn.qkv` 6, the contiguous q, k and v 3, the mixed values 2, each projection 2, `mlp.fc` 8, GELU 20,
/// and each residual sum 1. The scores are kept as products, scaled, masked, shifted, as exponentials and as shares.
const WIDTHS: usize = 55;
const SCORES: usize = 6;

/// Tensors of logits that the loss keeps: the logits, shifted, and their exponentials.
const LOGITS: usize = 3;

const F32: usize = size_of::<f32>();

/// The bytes of the tensors that one microbatch needs on one rank: those that the forward keeps for the backward, and the gradients
/// that the backward holds. Small tensors are left out.
/// A number beyond `u64::MAX` counts as `u64::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Of norms, linear layers and GELU, in all blocks.
    pub activations: u64,
    /// Of attention, in all blocks.
    pub scores: u64,
    /// Of the causal mask.
    pub mask: u64,
    /// Of the loss.
    pub logits: u64,
    /// The gradients of one block's tensors, which the backward holds beside them.
    pub gradients: u64,
}

impl Kept {
    /// Each part with its name, for a sum or a table.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, u64); 5] {
        let Self { activations, scores, mask, logits, gradients } = *self;
        [
            ("activations", activations),
            ("attention scores", scores),
            ("causal masks", mask),
            ("logits", logits),
            ("the backward of a block", gradients),
        ]
    }
}

impl Gpt {
    /// The memory of a microbatch of `batch` sequences as long as the context, with parameters in `compute`. With 16-bit parameters
    /// it is a lower bound, because norms and GELU compute in f32.
    #[must_use]
    pub fn kept(&self, batch: usize, compute: DType) -> Kept {
        let super::GptConfig { vocab, context, width, heads, layers } = self.config;
        let activations = product([batch, context, WIDTHS, width, compute.size_bytes()]);
        let scores = product([batch, context, context, heads, SCORES, F32]);
        Kept {
            activations: activations.saturating_mul(layers as u64),
            scores: scores.saturating_mul(layers as u64),
            gradients: activations.saturating_add(scores),
            mask: product([context, context, F32]),
            logits: product([batch, context, LOGITS, vocab, F32]),
        }
    }
}

fn product(factors: impl IntoIterator<Item = usize>) -> u64 {
    factors.into_iter().fold(1, |product: u64, factor| product.saturating_mul(factor as u64))
}
