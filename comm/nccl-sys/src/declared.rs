//! The declarations of this crate as text: the tokens that the compiler sees. `tests/header` compares them with `nccl.h`.
//!
//! Types are written as in Rust, without spaces of their own: `*const c_void`, `[c_char; NCCL_UNIQUE_ID_BYTES]`.

use crate::Version;
use crate::{constants, functions, handles, numbers, structs};

/// The libraries that have an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Since [`Version::OLDEST`] or before; a library without it is refused.
    Required,
    /// Since [`Version::OLDEST`] or before; a library without it is loaded.
    Optional,
    /// Since a later version; `None` or unknown in earlier libraries.
    Since(Version),
}

impl Presence {
    /// Whether NCCL of this version has it.
    #[must_use]
    pub fn is_in(self, version: Version) -> bool {
        !matches!(self, Self::Since(first) if version < first)
    }
}

/// A function.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Its name in C.
    pub name: &'static str,
    /// Names and types of its arguments, in order.
    pub arguments: &'static [(&'static str, &'static str)],
    /// The type that it returns; empty for `void`.
    pub returns: &'static str,
    /// The libraries that have it.
    pub presence: Presence,
}

/// A constant of an enum.
#[derive(Clone, Copy, Debug)]
pub struct Number {
    /// The enum.
    pub of: &'static str,
    /// Its name in C.
    pub name: &'static str,
    /// Its value.
    pub value: i32,
    /// The headers that have it.
    pub presence: Presence,
}

/// A `#define` of a number.
#[derive(Clone, Copy, Debug)]
pub struct Constant {
    /// Its name in C.
    pub name: &'static str,
    /// Its value. All values are exact in f64.
    pub value: f64,
    /// The headers that have it.
    pub presence: Presence,
}

/// A struct.
#[derive(Clone, Copy, Debug)]
pub struct Struct {
    /// Its name in C.
    pub name: &'static str,
    /// Its fields, in order.
    pub fields: &'static [Field],
    /// The headers that have it.
    pub presence: Presence,
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
    /// Its value in the header's initializer, if there is one.
    pub initial: Option<&'static str>,
    /// The headers that have it.
    pub presence: Presence,
}

/// A pointer to a private type of NCCL or CUDA.
#[derive(Clone, Copy, Debug)]
pub struct Handle {
    /// Its name in C.
    pub name: &'static str,
    /// The headers that have it.
    pub presence: Presence,
}

/// All declarations.
#[derive(Clone, Copy, Debug)]
pub struct Declarations {
    /// Functions.
    pub functions: &'static [Function],
    /// Constants of enums.
    pub numbers: &'static [&'static [Number]],
    /// Other constants.
    pub constants: &'static [Constant],
    /// Structs.
    pub structs: &'static [Struct],
    /// Handles.
    pub handles: &'static [Handle],
}

/// The declarations of this crate.
pub const ALL: Declarations = Declarations {
    functions: functions::DECLARED,
    numbers: numbers::DECLARED,
    constants: constants::DECLARED,
    structs: structs::DECLARED,
    handles: handles::DECLARED,
};
