//! What benches of whole steps share: a model whose gradients are there already, what the parts of its step take, and the
//! least and the median of times.

pub mod steps;
pub mod stopwatch;
pub mod times;
