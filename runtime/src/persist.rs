//! The state that optimizers put into checkpoints and take from them. The files are made above, in
//! `checkpoint`.
//!
//! In reading order: `problem` (of a checkpoint), `saved` (the state in a checkpoint, and the parts
//! that fit a model), `checkpointed` (the trait of an optimizer with state, its tensors, and
//! pairs).

pub(crate) mod checkpointed;
pub(crate) mod problem;
pub(crate) mod saved;
