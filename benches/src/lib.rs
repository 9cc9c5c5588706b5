//! Shared code of benches: the begin and the end of a program, sizes and times on its command line,
//! a model whose gradients exist already, the times of the parts of its step, and the least and the
//! median of times.

pub mod plot;
pub mod program;
pub mod size;
pub mod steps;
pub mod stopwatch;
pub mod times;
