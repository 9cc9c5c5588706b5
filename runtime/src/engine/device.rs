//! The parts of an engine that lie on a device. Without the feature `cuda` there are none: the same types then have no
//! values, so that the rest of the engine is written once.
//!
//! | on the host | on a device |
//! |---|---|
//! | `Vec<f32>` of sums | [`DeviceSums`] |
//! | their reduction, under way | [`DeviceScattering`], [`DeviceAllReducing`] |
//! | a shard's master and gather input | [`DeviceShard`] |
//! | a gather under way, a gathered unit | [`DeviceArriving`], [`DeviceFull`] |
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
