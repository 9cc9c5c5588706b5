//! The parts of an engine that lie on a device. Without the feature `cuda` a [`ModelDevice`] has no values, and the compiler
//! leaves this code out.
//!
//! | on the host | on a device |
//! |---|---|
//! | `Vec<f32>` of sums | [`DeviceSums`] |
//! | their reduction, under way | [`DeviceScattering`], [`DeviceAllReducing`] |
//! | a shard's master and gather input | [`DeviceShard`] |
//! | a gather under way, a gathered unit | [`DeviceArriving`], [`DeviceFull`] |

mod full;
mod model_device;
mod offload;
mod shard;
pub(crate) mod sums;

pub(crate) use self::{
    full::{DeviceArriving, DeviceFull},
    model_device::ModelDevice,
    shard::DeviceShard,
    sums::{DeviceAllReducing, DeviceScattering, DeviceSums},
};
