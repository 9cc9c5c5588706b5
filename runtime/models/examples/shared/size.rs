//! The default sizes of a run. `runtime_cost` measures with the same.

/// Replicas x shards.
pub(crate) const MESH: &str = "2x2";
/// Microbatches of a step.
pub(crate) const MICROBATCHES: usize = 2;
/// Sequences of a microbatch.
pub(crate) const BATCH: usize = 4;
/// Transformer blocks.
pub(crate) const LAYERS: usize = 3;
/// Size of the residual stream.
pub(crate) const WIDTH: usize = 96;
/// Attention heads.
pub(crate) const HEADS: usize = 4;
/// Characters in a sequence.
pub(crate) const CONTEXT: usize = 64;
