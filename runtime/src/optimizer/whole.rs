//! Updates of whole matrices and parameters, each by one rank of the shard group, its owner: `exchange` brings it there and back;
//! `staged` are the results, until
//! they are applied; `parameters` are updates that a program writes down.

mod exchange;
mod parameters;
mod staged;

pub(super) use exchange::{Exchange, OnOwner};
pub use parameters::{Whole, WholeParameters};
pub(super) use staged::Staged;
