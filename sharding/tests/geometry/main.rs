//! What holds for every layout and plan, on generated models; each formula against a count that is
//! written without it.

mod fingerprint;
mod generators;
mod layout;
mod memory;
mod refusals;
mod rows;
mod scale;
mod traffic;
