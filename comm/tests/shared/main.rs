//! Worlds with ranks that share memory, and their results beside those of ranks that do not.

mod apart;
#[path = "../common/mod.rs"]
mod common;
mod lending;
mod rendezvous;
mod slow;
mod values;
