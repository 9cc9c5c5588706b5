//! Properties of every layout and plan, on generated models. Each formula is compared with a count
//! that does not use it.

mod fingerprint;
mod generators;
mod layout;
mod memory_formulas;
mod optimizers;
mod refusals;
mod rows;
mod scale;
mod slices;
mod sums;
mod traffic;
