//! Bindings to NCCL, 2.18 to 2.32: the declarations of `nccl.h` that hsdp uses. The library is loaded at run time.
//!
//! Building this crate needs neither CUDA nor NCCL, and loading the library needs no GPU. The crate adds nothing to NCCL: a
//! caller of one of its [`Functions`] must meet the requirements of NCCL's manual. All names are NCCL's own.
//!
//! | C | here |
//! | --- | --- |
//! | a function | a field of [`Functions`]; every library that is loaded has it |
//! | an enum | an integer with named constants: a library may return numbers that are newer than this crate |
//! | a `#define` | a constant |
//! | `NCCL_CONFIG_INITIALIZER` | [`Nccl::config`], which fits the library that was loaded |
//!
//! ```no_run
//! let nccl = nccl_sys::Nccl::load()?;
//! println!("NCCL {} from {}", nccl.version(), nccl.library().display());
//! # Ok::<(), nccl_sys::Error>(())
//! ```
//!
//! The declarations are written by hand. `tests/header` compares each with a copy of `nccl.h`.
//! "Since" names the first release that has an item, among all releases from 2.18.1 to 2.32.3 that have a tag on GitHub
//! (NVIDIA/nccl, up to 2.30.7) or a package on PyPI (`nvidia-nccl-cu12`, `nvidia-nccl-cu13`).
//!
//! A module imports only modules before it. In reading order: `version`; `declare` (the macros);
//! `numbers`, `structs`; `error`, `library` (one that was opened), `functions`, `load`; [`declared`]
//! (the declarations as text, for the test).

#![allow(
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "the names are those of nccl.h, so that its manual is the manual of this crate"
)]

#[macro_use]
mod declare;

pub mod declared;
mod error;
mod functions;
mod library;
mod load;
mod numbers;
mod structs;
mod version;

pub use self::error::{Attempt, Error};
pub use self::functions::Functions;
pub use self::load::Nccl;
pub use self::numbers::{
    NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, NCCL_UNIQUE_ID_BYTES, ncclDataType_t, ncclRedOp_t,
    ncclResult_t,
};
pub use self::structs::{
    CUstream_st, cudaStream_t, ncclComm, ncclComm_t, ncclConfig_t, ncclUniqueId,
};
pub use self::version::Version;
