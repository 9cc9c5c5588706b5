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
//! In reading order: `macros`, `declarations`, `load`; [`declared`] has the declarations as text, for
//! the test.

#![allow(
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "the names are those of nccl.h, so that its manual is the manual of this crate"
)]

#[macro_use]
mod macros;

mod declarations;
mod load;

/// The declarations of this crate as text: the tokens that the compiler sees. `tests/header` compares
/// them with `nccl.h`.
///
/// Types are written as in Rust, without spaces of their own: `*const c_void`,
/// `[c_char; NCCL_UNIQUE_ID_BYTES]`. `since` is the first version that has an item, or
/// [`Version::OLDEST`](crate::Version::OLDEST) if the item is older.
pub mod declared {
    pub use crate::macros::{Field, Function, Number, Struct};
    use crate::{declarations, load};

    /// All declarations.
    #[derive(Clone, Copy, Debug)]
    pub struct Declarations {
        /// Functions.
        pub functions: &'static [Function],
        /// Constants of enums, and other constants. An enum that functions return is declared as a whole.
        pub numbers: &'static [&'static [Number]],
        /// Structs.
        pub structs: &'static [Struct],
        /// Names of pointers to private types of NCCL.
        pub handles: &'static [&'static str],
    }

    /// The declarations of this crate.
    pub const ALL: Declarations = Declarations {
        functions: load::FUNCTIONS,
        numbers: declarations::NUMBERS,
        structs: declarations::STRUCTS,
        handles: &["ncclComm_t"],
    };
}

pub use self::declarations::{
    CUstream_st, NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, NCCL_UNIQUE_ID_BYTES, cudaStream_t,
    ncclComm, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
pub use self::load::{Attempt, Error, Functions, Nccl};
pub use self::macros::Version;
