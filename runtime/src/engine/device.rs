//! What of an engine lies on a device. Without the feature `cuda` nothing does: the same types, which have no values then, so that
//! the rest of the engine is written once.
//!
//! | on the host | on a device |
//! |---|---|
//! | `Vec<f32>` of sums | [`DeviceSums`] |
//! | its reduction on its way | [`DeviceScattering`], [`DeviceAllReducing`] |
//! | a shard's master and gather input | [`DeviceShard`] |
//! | a gather on its way, a gathered unit | [`DeviceArriving`], [`DeviceFull`] |
//! | sums that wait unsharded | [`DeviceUnsharded`] |

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod full;
#[cfg(feature = "cuda")]
mod offload;
#[cfg(feature = "cuda")]
mod seat;
#[cfg(feature = "cuda")]
mod shard;
#[cfg(feature = "cuda")]
mod sums;
#[cfg(feature = "cuda")]
mod unsharded;

#[cfg(not(feature = "cuda"))]
pub(crate) use self::absent::{
    DeviceAllReducing, DeviceArriving, DeviceFull, DeviceScattering, DeviceSeat, DeviceShard,
    DeviceSums, DeviceUnsharded,
};
#[cfg(feature = "cuda")]
pub(crate) use self::sums::read_f32;
#[cfg(feature = "cuda")]
pub(crate) use self::{
    full::{DeviceArriving, DeviceFull},
    seat::DeviceSeat,
    shard::DeviceShard,
    sums::{DeviceAllReducing, DeviceScattering, DeviceSums},
    unsharded::DeviceUnsharded,
};
