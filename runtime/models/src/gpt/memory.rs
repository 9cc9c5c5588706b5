//! The memory of a microbatch, computed before it runs.

use hsdp_sharding::DType;

use super::Gpt;
use crate::nn;

/// Sizes of the tensors that a block keeps, in widths of the residual stream: each norm 1,
/// `attn.qkv` 3, attention 1, each projection 1, `mlp.fc` 4, GELU 4, and each residual sum 1.
const WIDTHS: usize = 18;

/// Sizes of the tensors outside of the blocks: the embeddings, their sum, and the last norm.
const WIDTHS_OF_ENDS: usize = 3;

/// Maximum sizes of additional tensors during the backward: of a block, of its attention beside the
/// scores, and of the loss, in logits. These are measured. candle adds each gradient to zeros, so
/// three tensors of a kind exist at once.
const GRADIENT_WIDTHS: usize = 17;
const ATTENTION_WIDTHS: usize = 12;
const GRADIENT_LOGITS: usize = 3;

/// Bytes of the tensors that one microbatch needs on one rank: tensors that the forward keeps for
/// the backward, and gradients that the backward holds. Small tensors are left out. A number beyond
/// `u64::MAX` counts as `u64::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Bytes that the layers keep.
    pub activations: u64,
    /// Bytes that the loss keeps.
    pub logits: u64,
    /// Maximum bytes that the backward holds besides: gradients of one block's tensors, or of the
    /// logits. With 16-bit parameters this is a lower bound, because linear layers and attention
    /// widen their operands.
    pub gradients: u64,
}

impl Kept {
    /// Returns each part with its name, for a sum or a table.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, u64); 3] {
        let Self { activations, logits, gradients } = *self;
        [("activations", activations), ("logits", logits), ("the backward of a block", gradients)]
    }
}

impl Gpt {
    /// Returns the memory of a microbatch of `batch` sequences as long as the context, with
    /// parameters in `compute`, if candle computes on the CPU. On a GPU the layers take more.
    #[must_use]
    pub fn kept(&self, batch: usize, compute: DType) -> Kept {
        let super::GptConfig { vocab, context, width, heads, layers } = self.config;
        let bytes = compute.size_bytes();
        let widths = |count| product([count, batch, context, width, bytes]);
        let logits = |count| product([count, batch, context, vocab, bytes]);
        let room = room_of_scores(context, batch.saturating_mul(heads));
        let of_block = widths(GRADIENT_WIDTHS).max(widths(ATTENTION_WIDTHS).saturating_add(room));
        Kept {
            activations: widths(WIDTHS)
                .saturating_mul(layers as u64)
                .saturating_add(widths(WIDTHS_OF_ENDS)),
            gradients: of_block.max(logits(GRADIENT_LOGITS)),
            logits: logits(1),
        }
    }
}

/// Returns the bytes of the scores and their gradients that attention computes at one time.
fn room_of_scores(context: usize, all: usize) -> u64 {
    let at_once = rayon::current_num_threads().min(all);
    product([2, at_once, context, nn::BLOCK.min(context), size_of::<f32>()])
}

fn product(factors: impl IntoIterator<Item = usize>) -> u64 {
    factors.into_iter().fold(1, |product: u64, factor| product.saturating_mul(factor as u64))
}
