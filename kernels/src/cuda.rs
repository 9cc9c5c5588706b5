//! The same arithmetic on a GPU: device memory, streams, and the kernels of `kernels/cuda`. `CUDA.md`, beside the sources of this
//! crate, says how operations are ordered.
//!
//! | concept | CPU | here |
//! | --- | --- | --- |
//! | a buffer whose dtype is a value | [`HostBuffer`](crate::HostBuffer) | [`DeviceBuffer`] |
//! | where it is computed | the calling thread | [`Stream`] of a [`Device`] |
//! | copy-in of a reduction | [`pack`](crate::pack) | [`Stream::pack`] |
//! | sums of members | [`sum_contributions`](crate::sum_contributions) | [`Stream::sum`] |
//! | casts | [`cast`](crate::cast) | [`Stream::narrow`] |
//! | norm, check | [`squared_norm`](crate::squared_norm), [`first_non_finite`](crate::first_non_finite) | [`Stream::inspect`] |
//! | updates | [`update_in_blocks`](crate::update_in_blocks) | [`Stream::adamw`], [`Stream::sgd`] |
//!
//! Libraries of the system (driver and NVRTC) are loaded when a [`Device`] is first asked for: a program that is built with
//! this feature runs on a machine without them. Kernels are compiled then, for the architecture of the device.
//!
//! In reading order: `error`, `libraries`, `source`, `compile` (what is compiled, and by what); `device`, `event`, `stream` (where it runs);
//! `budget`, `memory`, `staging`, `buffer`, `foreign` (on what); `launch`, `table`, `noted` (how kernels get their arguments, and what they note); `pack`, `sum`, `inspect`, `update` (the kernels); `gradients` (what
//! is packed, wherever it lies).

mod budget;
mod buffer;
mod compile;
mod device;
mod error;
mod event;
mod foreign;
mod gradients;
mod inspect;
mod launch;
mod libraries;
mod memory;
mod noted;
mod pack;
mod source;
mod staging;
mod stream;
mod sum;
mod table;
mod update;

pub use self::buffer::DeviceBuffer;
pub use self::compile::{Architecture, compile};
pub use self::device::Device;
pub use self::error::CudaError;
pub use self::event::Moment;
pub use self::gradients::{DevicePart, DeviceSlice};
pub use self::inspect::Seen;
pub use self::noted::{FirstFound, Noted, Notes, WhatWasNoted};
pub use self::pack::{Packed, Unpacked};
pub use self::stream::{Stream, Together};
pub use self::update::{DeviceUpdate, PieceOfStep};
