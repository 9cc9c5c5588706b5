//! The arithmetic of this crate on a GPU: device memory, streams, and the kernels of `kernels/cuda`. `CUDA.md` in the folder of this
//! crate describes the order of operations.
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
//! | products of matrices | [`matmul`](crate::matmul) | [`MatrixProduct`], of which [`Cublas`] is one |
//! | the orthogonalization of Muon | [`NewtonSchulz`](crate::NewtonSchulz) | [`Stream::orthogonalize`] |
//!
//! The driver is loaded at run time, by the first call of [`Device::new`] or [`Device::count`]. NVRTC is loaded when kernels are
//! compiled, before the first launch or by [`Device::prepare`], for the architecture of the device; cuBLAS by [`Cublas::new`]. So a program that is built with
//! the feature `cuda` also runs on a machine without these libraries. Without the feature there is no driver: the types are the same,
//! a [`Device`] has no values, and the compiler leaves out the code that would use one.
//!
//! Calls that issue an operation return before the device has executed it, unless their documentation says that they wait. An error
//! of the device then comes from a later call. The first launch compiles all kernels: so every call that launches a kernel can also
//! fail with [`CudaError::MissingLibrary`] or [`CudaError::Compile`], unless [`Device::prepare`] has succeeded before.
//!
//! Modules in reading order: `error`, `kernel`; `driver` (the driver's calls, compilation), or `absent` in its place; `device`, `event`,
//! `together`, `stream` (execution); `budget`, `memory`, `staging`, `buffer`, `slice`, `foreign` (memory); `launch`, `table`, `noted` (arguments of kernels,
//! and notes that they write); `pack`, `sum`, `inspect`, `update`, `muon` (the kernels); `product`, `cublas`, `newton_schulz` (products of
//! matrices).

mod budget;
mod buffer;
mod cublas;
mod device;
#[cfg_attr(not(feature = "cuda"), path = "cuda/absent.rs")]
mod driver;
mod error;
mod event;
mod foreign;
mod inspect;
mod kernel;
mod launch;
mod memory;
mod muon;
mod newton_schulz;
mod noted;
mod once;
mod pack;
mod product;
mod slice;
mod staging;
mod stream;
mod sum;
mod table;
mod together;
mod update;

pub use self::buffer::DeviceBuffer;
pub use self::cublas::Cublas;
pub use self::device::{Architecture, Device};
pub use self::driver::{HAS_DEVICES, compile};
pub use self::error::CudaError;
pub use self::event::Moment;
pub use self::inspect::Seen;
pub use self::muon::PartOfMatrix;
pub use self::newton_schulz::NewtonSchulzBuffers;
pub use self::noted::{FirstFound, Noted, Notes, WhatWasNoted};
pub use self::pack::{Packed, Unpacked};
pub use self::product::{DeviceMatrix, MatrixProduct, Product, Stored};
pub use self::slice::{DevicePart, DeviceSlice};
pub use self::stream::{Stream, Together};
pub use self::together::{Apart, Whole};
pub use self::update::{DeviceUpdate, PieceOfStep};
