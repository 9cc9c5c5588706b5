//! The state of a rank's model: the constant context, the parameters, the buffers that the forward
//! writes, the sums of gradients, the pools of memory, and the channel on which ranks exchange
//! small records.
//!
//! Values lie on the host or on a device (`store`), and each kind of them matches the two in its
//! own file. This floor issues single operations. It knows neither their order in a step nor the
//! meaning of the records.

pub(crate) mod buffers;
pub(crate) mod context;
pub(crate) mod control;
pub(crate) mod events;
pub(crate) mod full;
pub(crate) mod full_pool;
pub(crate) mod gradients;
pub(crate) mod lock;
pub(crate) mod masters;
pub(crate) mod model_device;
pub(crate) mod shard;
pub(crate) mod sighting;
pub(crate) mod slices;
pub(crate) mod store;
pub(crate) mod sums;
