//! The state that optimizers put into checkpoints and take from them. The files are made above, in
//! `checkpoint`.
//!
//! In reading order: `problem` (of a checkpoint), `tensors` (of an optimizer's state), `options`
//! (those of an optimizer), `fitting` (the parts that fit a model), `saved` (the state in a
//! checkpoint), `checkpointed` (the trait), `pair` (two optimizers as one).

pub(crate) mod checkpointed;
pub(crate) mod fitting;
pub(crate) mod options;
pub(crate) mod pair;
pub(crate) mod problem;
pub(crate) mod saved;
pub(crate) mod tensors;
