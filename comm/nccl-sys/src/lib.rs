//! NCCL's names and numbers: what `nccl.h` of 2.18 to 2.32 declares, loaded when a program runs.
//!
//! Nothing of CUDA or NCCL is needed to build this crate, and no GPU to load the library. It adds nothing to NCCL: who calls
//! one of its [`Functions`] keeps what NCCL's manual asks for. NCCL's own names are used throughout.
//!
//! | C | here |
//! | --- | --- |
//! | a function | a field of [`Functions`], an `Option` where an older library may lack it |
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
//! The declarations are kept by hand. `tests/header` compares each with a copy of `nccl.h`, both ways. Since when
//! something exists was read from the headers of all releases from 2.18.1 to 2.32.3 that have a tag on GitHub
//! (NVIDIA/nccl, up to 2.30.7) or a package on PyPI (`nvidia-nccl-cu12`, `nvidia-nccl-cu13`): it is the first of them that
//! has it.
//!
//! In reading order: `load`, `functions`, `numbers`, `structs`, `handles`, `constants`; `declare` (the macros), [`declared`]
//! (what they leave for the test).

#![allow(
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "the names are those of nccl.h, so that its manual is the manual of this crate"
)]

#[macro_use]
mod declare;

mod constants;
pub mod declared;
mod error;
mod functions;
mod handles;
mod load;
mod numbers;
mod structs;
mod version;

pub use constants::*;
pub use error::{Attempt, Error};
pub use functions::Functions;
pub use handles::*;
pub use load::Nccl;
pub use numbers::*;
pub use structs::*;
pub use version::Version;
