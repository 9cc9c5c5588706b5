//! The records that ranks exchange, and the conclusions that they draw from them.
//!
//! A conclusion is a function of the records of all ranks, so that all ranks draw the same one.
//! This floor does not act on it: steps and checkpoints do.

pub(crate) mod agreement;
pub(crate) mod buffers;
pub(crate) mod comparison;
pub(crate) mod header;
pub(crate) mod unit_use;
