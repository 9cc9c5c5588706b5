//! The memory of a microbatch, before it runs.

use hsdp_sharding::DType;

use super::Gpt;

/// Tensors that a block keeps: as wide as the residual stream (in widths), and of attention scores.
///
/// A norm keeps 1 width, `attn.qkv` 6, the contiguous q, k and v 3, the mixed values 2, each projection 2, `mlp.fc` 8, GELU 4,
/// and each residual sum 1. The scores are kept as products and as shares.
const WIDTHS: usize = 31;
const SCORES: usize = 2;

/// The most such tensors that the backward of a block holds beside them, and that of the loss, of logits: as measured. candle adds each
/// gradient to zeros, so three of a kind exist at once; those of a matmul's input remain while the op before it does the same.
const GRADIENT_WIDTHS: usize = 21;
const GRADIENT_SCORES: usize = 6;
const GRADIENT_LOGITS: usize = 3;

/// The bytes of the tensors that one microbatch needs on one rank: those that the forward keeps for the backward, and the gradients
/// that the backward holds. Small tensors are left out.
/// A number beyond `u64::MAX` counts as `u64::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Of norms, linear layers and GELU, in all blocks.
    pub activations: u64,
    /// Of attention, in all blocks.
    pub scores: u64,
    /// Of the loss.
    pub logits: u64,
    /// The most that the backward holds beside them: gradients of one block's tensors, or of the logits. With 16-bit
    /// parameters it is a lower bound, because candle's matmul widens its operands.
    pub gradients: u64,
}

impl Kept {
    /// Each part with its name, for a sum or a table.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, u64); 4] {
        let Self { activations, scores, logits, gradients } = *self;
        [
            ("activations", activations),
            ("attention scores", scores),
            ("logits", logits),
            ("the backward of a block", gradients),
        ]
    }
}

impl Gpt {
    /// The memory of a microbatch of `batch` sequences as long as the context, with parameters in `compute`, if candle computes on the
    /// CPU. On a GPU the layers take more.
    #[must_use]
    pub fn kept(&self, batch: usize, compute: DType) -> Kept {
        let super::GptConfig { vocab, context, width, heads, layers } = self.config;
        let bytes = compute.size_bytes();
        let widths = |count| product([count, batch, context, width, bytes]);
        let scores = |count| product([count, batch, context, context, heads, bytes]);
        let logits = |count| product([count, batch, context, vocab, bytes]);
        let of_block = widths(GRADIENT_WIDTHS).max(scores(GRADIENT_SCORES));
        Kept {
            activations: widths(WIDTHS).saturating_mul(layers as u64),
            scores: scores(SCORES).saturating_mul(layers as u64),
            gradients: of_block.max(logits(GRADIENT_LOGITS)),
            logits: logits(1),
        }
    }
}

fn product(factors: impl IntoIterator<Item = usize>) -> u64 {
    factors.into_iter().fold(1, |product: u64, factor| product.saturating_mul(factor as u64))
}
