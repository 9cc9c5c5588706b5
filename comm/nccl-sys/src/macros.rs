//! Versions; the macros of declarations, and the declarations that they keep as text: each item is declared
//! once, for the compiler and for [`declared`](crate::declared), from the same tokens.
//!
//! A declaration that is newer than 2.18 ends with its version: `, since(2, 19, 1)`. The version becomes a line of its
//! documentation, and the test compares it.

use std::fmt;

/// A version of NCCL, in the encoding of `ncclGetVersion`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u32);

impl Version {
    /// The oldest version that is loaded: the first with `ncclCommSplit`.
    pub const OLDEST: Self = Self::new(2, 18, 0);

    /// The newest version whose declarations this crate has. Newer versions are loaded, without their additions.
    pub const NEWEST: Self = Self::new(2, 32, 3);

    /// The version `major.minor.patch`, in the encoding since 2.9.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self(major * 10_000 + minor * 100 + patch)
    }

    /// The version with this code.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        Self(code)
    }

    /// `NCCL_VERSION_CODE` in the header of this version.
    #[must_use]
    pub const fn code(self) -> u32 {
        self.0
    }

    /// Major, minor and patch. Up to 2.8 a code had four digits: 2804 is 2.8.4.
    #[must_use]
    pub const fn parts(self) -> (u32, u32, u32) {
        let major = if self.0 < 10_000 { 1000 } else { 10_000 };
        (self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.parts();
        write!(f, "{major}.{minor}.{patch}")
    }
}

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

/// The first version that has an item.
macro_rules! since {
    () => {
        $crate::Version::OLDEST
    };
    ($major:literal, $minor:literal, $patch:literal) => {
        $crate::Version::new($major, $minor, $patch)
    };
}

/// The struct of all functions: `name(argument: type, ...) -> type;` and so on.
macro_rules! functions {
    ($(
        $(#[$doc:meta])*
        $name:ident($($argument:ident: $type:ty),*) -> $returns:ty;
    )*) => {
        /// NCCL's functions, by their names in C. All are `unsafe`: NCCL's manual states the requirements of each.
        #[derive(Clone, Copy, Debug)]
        pub struct Functions {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($argument: $type),*) -> $returns,)*
        }

        impl Functions {
            /// The functions of a library.
            pub(crate) fn found_in(library: &Library) -> Result<Self, Error> {
                Ok(Self {
                    $(
                        // SAFETY: NC-2, the type of the field is the function's.
                        $name: unsafe { library.function(stringify!($name)) }?,
                    )*
                })
            }
        }

        pub(crate) const FUNCTIONS: &[Function] = &[$(Function {
            name: stringify!($name),
            arguments: &[$((stringify!($argument), stringify!($type))),*],
            returns: stringify!($returns),
        }),*];
    };
}

/// Enums, as integers: `enum { name = value; name = value, since(2, 19, 1); }`.
macro_rules! numbers {
    ($(
        $(#[$doc:meta])*
        $type:ident {
            $($(#[$number_doc:meta])* $name:ident = $value:expr $(, since($($since:literal),*))?;)*
        }
    )*) => {
        $(
            $(#[$doc])*
            ///
            /// Displays as its name, or as the number itself if this crate has no name for it.
            #[repr(transparent)]
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            pub struct $type(
                /// The number.
                pub c_int,
            );

            impl $type {
                $(
                    $(#[$number_doc])*
                    $(#[doc = concat!("\n\nSince " $(, $since, ".")*)])?
                    pub const $name: Self = Self($value);
                )*

                const NUMBERS: &[Number] = &[$(Number {
                    of: stringify!($type),
                    name: stringify!($name),
                    value: $value as i64,
                    since: since!($($($since),*)?),
                }),*];
            }

            impl fmt::Display for $type {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    match Self::NUMBERS.iter().find(|number| number.value == i64::from(self.0)) {
                        Some(number) => f.write_str(number.name),
                        None => write!(f, "{}", self.0),
                    }
                }
            }
        )*

        pub(crate) const NUMBERS: &[&[Number]] = &[CONSTANTS, $($type::NUMBERS),*];
    };
}

/// Constants: `name: type = value;`.
macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr $(, since($($since:literal),*))?;)*) => {
        $(
            $(#[$doc])*
            $(#[doc = concat!("\n\nSince " $(, $since, ".")*)])?
            pub const $name: $type = $value;
        )*

        const CONSTANTS: &[Number] = &[$(Number {
            of: "",
            name: stringify!($name),
            value: $name as i64,
            since: since!($($($since),*)?),
        }),*];
    };
}

/// A struct: `name { field: type; ... }`, or with the values of its initializer: `name { field: type = value; ... }`.
macro_rules! fields {
    (
        $(#[$doc:meta])*
        $name:ident {
            $(
                $(#[$field_doc:meta])*
                $field:ident: $type:ty $(= $initial:expr)? $(, since($($since:literal),*))?;
            )*
        }
    ) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $(
                $(#[$field_doc])*
                $(#[doc = concat!("\n\nSince " $(, $since, ".")*)])?
                pub $field: $type,
            )*
        }

        impl $name {
            fields!(@initializer $($field $(= $initial)?;)*);

            const STRUCT: Struct = Struct {
                name: stringify!($name),
                fields: &[$(Field {
                    name: stringify!($field),
                    type_name: stringify!($type),
                    offset: offset_of!($name, $field),
                    initial: concat!($(stringify!($initial))?),
                    since: since!($($($since),*)?),
                }),*],
            };
        }
    };
    (@initializer $($field:ident = $initial:expr;)*) => {
        /// The value of the initializer in the header of [`Version::NEWEST`]: every option is left to NCCL.
        pub const INITIALIZER: Self = Self { $($field: $initial),* };
    };
    (@initializer $($field:ident;)*) => {};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_read_as_nccl_writes_them() {
        for (code, version) in [(23_203, "2.32.3"), (21_801, "2.18.1"), (2804, "2.8.4")] {
            assert_eq!(Version::from_code(code).to_string(), version);
        }
        assert_eq!(Version::new(2, 18, 1).code(), 21_801);
        assert!(Version::from_code(2804) < Version::OLDEST);
    }
}
