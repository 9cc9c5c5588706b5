//! The declarations of this crate as text: the tokens that the compiler sees. `tests/header` compares them with `nccl.h`.
//!
//! Types are written as in Rust, without spaces of their own: `*const c_void`, `[c_char; NCCL_UNIQUE_ID_BYTES]`. `since` is
//! the first version that has an item, or [`Version::OLDEST`] if the item is older.

use crate::Version;
use crate::{functions, numbers, structs};

/// A function.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Its name in C.
    pub name: &'static str,
    /// Names and types of its arguments, in order.
    pub arguments: &'static [(&'static str, &'static str)],
    /// The type that it returns.
    pub returns: &'static str,
}

/// A constant of an enum, or a `#define` of a number.
#[derive(Clone, Copy, Debug)]
pub struct Number {
    /// The enum; empty for a `#define`.
    pub of: &'static str,
    /// Its name in C.
    pub name: &'static str,
    /// Its value.
    pub value: i64,
    /// The first version that has it.
    pub since: Version,
}

/// A struct.
#[derive(Clone, Copy, Debug)]
pub struct Struct {
    /// Its name in C.
    pub name: &'static str,
    /// Its fields, in order.
    pub fields: &'static [Field],
}

/// A field of a struct.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name in C.
    pub name: &'static str,
    /// Its type.
    pub type_name: &'static str,
    /// Bytes from the start of the struct.
    pub offset: usize,
    /// Its value in the header's initializer; empty if the header has none.
    pub initial: &'static str,
    /// The first version that has it.
    pub since: Version,
}

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
