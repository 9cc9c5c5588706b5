//! The declarations of this crate as text: the tokens that the compiler sees. `tests/header` compares them with `nccl.h`.
//!
//! Types are written as in Rust, without spaces of their own: `*const c_void`, `[c_char; NCCL_UNIQUE_ID_BYTES]`. `since` is
//! the first version that has an item, or [`Version::OLDEST`](crate::Version::OLDEST) if the item is older.

pub use crate::declare::{Field, Function, Number, Struct};
use crate::{functions, numbers, structs};

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
    functions: functions::DECLARED,
    numbers: numbers::DECLARED,
    structs: structs::DECLARED,
    handles: &["ncclComm_t"],
};
