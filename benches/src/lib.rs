//! What benches share: how a program begins and ends, sizes and times on its command line, a model whose gradients are there
//! already, what the parts of its step take, and the least and the median of times.

pub mod program;
pub mod size;
pub mod steps;
pub mod stopwatch;
pub mod times;
