//! The state of a rank's model, wherever it lies.

pub(crate) mod context;
pub(crate) mod control;
pub(crate) mod events;
pub(crate) mod full;
pub(crate) mod full_pool;
pub(crate) mod joint;
pub(crate) mod kept;
pub(crate) mod lock;
pub(crate) mod model_device;
pub(crate) mod model_id;
pub(crate) mod schedule;
mod scratch;
pub(crate) mod shard;
pub(crate) mod sighting;
pub(crate) mod sums;
pub(crate) mod unused;
