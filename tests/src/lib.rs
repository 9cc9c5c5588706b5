//! Tests across the crates, and the conformance runner.

pub mod conformance;
pub mod soak;
pub mod support;
