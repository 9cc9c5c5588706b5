//! Updates of parameters, in f32, in PyTorch's order of operations.

mod adamw;
mod sgd;

pub use adamw::{AdamWStep, adamw};
pub use sgd::{MomentumKind, SgdStep, sgd};
