//! The arithmetic of this crate on a GPU: device memory, streams, and the kernels of
//! `kernels/cuda`. `CUDA.md` in the folder of this crate describes the order of operations.
//!
//! | concept | CPU | here |
//! | --- | --- | --- |
//! | a buffer whose dtype is known at run time | [`HostBuffer`](crate::HostBuffer) | [`DeviceBuffer`] |
//! | execution | the calling thread | [`Stream`] of a [`Device`] |
//! | copy-in of a reduction | [`pack`](crate::pack) | [`Stream::pack`] |
//! | sums of contributions | [`sum_contributions`](crate::sum_contributions) | [`Stream::sum`] |
//! | casts | [`cast`](crate::cast) | [`Stream::narrow`] |
//! | norm, check | [`squared_norm`](crate::squared_norm), [`first_non_finite`](crate::first_non_finite) | [`Stream::inspect`] |
//! | updates | [`update_in_blocks`](crate::update_in_blocks) | [`Stream::adamw`], [`Stream::sgd`], [`Stream::lion`], [`Stream::muon`] |
//! | products of matrices | [`matmul`](crate::matmul) | [`Cublas::multiply`] |
//! | the orthogonalization of Muon | [`NewtonSchulz`](crate::NewtonSchulz) | [`Stream::orthogonalize`] |
//!
//! The driver is loaded at run time, by the first call of [`Device::new`] or [`Device::count`].
//! NVRTC is loaded when kernels are compiled, before the first launch or by [`Device::prepare`],
//! for the architecture of the device; cuBLAS by [`Cublas::new`]. So a program that is built with
//! the feature `cuda` also runs on a machine without these libraries. Without the feature there is
//! no driver: the types are the same, a [`Device`] has no values, and the compiler leaves out the
//! code that would use one.
//!
//! Calls that issue an operation return before the device has executed it, unless their
//! documentation says that they wait. An error of the device then comes from a later call. The
//! first launch compiles all kernels: so every call that launches a kernel can also fail with
//! [`CudaError::MissingLibrary`] or [`CudaError::Compile`], unless [`Device::prepare`] has
//! succeeded before.
//!
//! Modules in reading order: `error`; `driver` (the driver's calls, compilation), or `absent` in
//! its place; `device` (with the names of kernels), `stream` (execution); `memory`, `buffer`;
//! `launch` (arguments of kernels, and notes that they write); `wire`, `update` (the kernels);
//! `product`, `newton_schulz` (products of matrices).

mod buffer;
mod device;
#[cfg_attr(not(feature = "cuda"), path = "cuda/absent.rs")]
mod driver;
mod error;
mod launch;
mod memory;
mod newton_schulz;
mod product;
mod stream;
mod update;
mod wire;

pub use self::buffer::{DeviceBuffer, DevicePart, DeviceSlice};
pub use self::device::{Architecture, Device};
pub use self::driver::{HAS_DEVICES, compile};
pub use self::error::CudaError;
pub use self::launch::{FirstFound, Noted, Notes, WhatWasNoted};
pub use self::newton_schulz::NewtonSchulzBuffers;
pub use self::product::{Cublas, DeviceMatrices, DeviceMatrix, Product, Stored};
pub use self::stream::{Apart, IssueGuard, Moment, Stream, Together};
pub use self::update::{DeviceUpdate, PartOfMatrix, PieceOfStep};
pub use self::wire::{Packed, Seen};
