//! Updates of whole matrices, each by one rank of the shard group, its owner: `exchange` brings it there and back.

mod exchange;

pub(super) use exchange::Exchange;
