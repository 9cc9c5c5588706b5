//! The macros of declarations: each item is declared once, for the compiler and for [`declared`](crate::declared), from
//! the same tokens.
//!
//! A declaration that is newer than 2.18 ends with its version: `, since(2, 19, 1)`. The version becomes a line of its
//! documentation, and the test compares it.

/// The presence of an item: nothing, `required`, `optional` or `since(major, minor, patch)`.
macro_rules! presence {
    (required) => {
        $crate::declared::Presence::Required
    };
    ($(optional)?) => {
        $crate::declared::Presence::Optional
    };
    (since($major:literal, $minor:literal, $patch:literal)) => {
        $crate::declared::Presence::Since($crate::Version::new($major, $minor, $patch))
    };
}

/// The struct of all functions: `name(argument: type, ...) -> type, required;` and so on. Without `required` a field is an
/// `Option`.
macro_rules! functions {
    (@type required, $($signature:tt)*) => { $($signature)* };
    (@type $presence:ident, $($signature:tt)*) => { Option<$($signature)*> };
    (@find required, $library:ident, $name:ident) => {
        // SAFETY: NC-2, the type of the field is the function's.
        unsafe { $library.function(stringify!($name)) }?
    };
    (@find $presence:ident, $library:ident, $name:ident) => {
        // SAFETY: NC-2, the type of the field is the function's.
        unsafe { $library.function(stringify!($name)) }.ok()
    };
    ($(
        $(#[$doc:meta])*
        $name:ident($($argument:ident: $type:ty),*) $(-> $returns:ty)?,
        $presence:ident $(($($since:literal),*))?;
    )*) => {
        /// NCCL's functions, by their names in C. All are `unsafe`: NCCL's manual states the requirements of each.
        ///
        /// A function whose field is not an `Option` exists in every library that is loaded.
        #[derive(Clone, Copy, Debug)]
        pub struct Functions {
            $(
                $(#[$doc])*
                $(#[doc = concat!("\n\nSince ", since_text!($($since),*), ".")])?
                pub $name: functions!(
                    @type $presence, unsafe extern "C" fn($($argument: $type),*) $(-> $returns)?
                ),
            )*
        }

        impl Functions {
            /// The functions of a library.
            pub(crate) fn found_in(library: &Library) -> Result<Self, Error> {
                Ok(Self { $($name: functions!(@find $presence, library, $name),)* })
            }
        }

        pub(crate) const DECLARED: &[Function] = &[$(Function {
            name: stringify!($name),
            arguments: &[$((stringify!($argument), stringify!($type))),*],
            returns: concat!($(stringify!($returns))?),
            presence: presence!($presence $(($($since),*))?),
        }),*];
    };
}

/// `2.19.1`
macro_rules! since_text {
    ($major:literal, $minor:literal, $patch:literal) => {
        concat!($major, ".", $minor, ".", $patch)
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
                    $(#[doc = concat!("\n\nSince ", since_text!($($since),*), ".")])?
                    pub const $name: Self = Self($value);
                )*

                const NUMBERS: &[Number] = &[$(Number {
                    of: stringify!($type),
                    name: stringify!($name),
                    value: $value,
                    presence: presence!($(since($($since),*))?),
                }),*];
            }

            impl fmt::Display for $type {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    match Self::NUMBERS.iter().find(|number| number.value == self.0) {
                        Some(number) => f.write_str(number.name),
                        None => write!(f, "{}", self.0),
                    }
                }
            }
        )*

        pub(crate) const DECLARED: &[&[Number]] = &[$($type::NUMBERS),*];
    };
}

/// Constants: `name: type = value;`.
macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr $(, since($($since:literal),*))?;)*) => {
        $(
            $(#[$doc])*
            $(#[doc = concat!("\n\nSince ", since_text!($($since),*), ".")])?
            pub const $name: $type = $value;
        )*

        pub(crate) const DECLARED: &[Constant] = &[$(Constant {
            name: stringify!($name),
            value: $name as f64,
            presence: presence!($(since($($since),*))?),
        }),*];
    };
}

/// Handles: `name -> struct`, where the content of the struct is private to NCCL or CUDA.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident -> $struct:ident $(, since($($since:literal),*))?;)*) => {
        $(
            #[doc = concat!("The target of an `", stringify!($name), "`.")]
            #[repr(C)]
            #[derive(Debug)]
            pub struct $struct {
                unknown: [u8; 0],
                // Not `Send`, `Sync` or `Unpin`, since its content is unknown.
                pinned: PhantomData<(*mut u8, PhantomPinned)>,
            }

            $(#[$doc])*
            pub type $name = *mut $struct;
        )*

        pub(crate) const DECLARED: &[Handle] = &[$(Handle {
            name: stringify!($name),
            presence: presence!($(since($($since),*))?),
        }),*];
    };
}

/// A struct: `name { field: type, ... }`, or with the values of its initializer: `name { field: type = value, ... }`.
macro_rules! structs {
    ($(
        $(#[$doc:meta])*
        $name:ident $(since($($first:literal),*))? {
            $(
                $(#[$field_doc:meta])*
                $field:ident: $type:ty $(= $initial:expr)? $(, since($($since:literal),*))?;
            )*
        }
    )*) => {
        $(
            $(#[$doc])*
            $(#[doc = concat!("\n\nSince ", since_text!($($first),*), ".")])?
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            pub struct $name {
                $(
                    $(#[$field_doc])*
                    $(#[doc = concat!("\n\nSince ", since_text!($($since),*), ".")])?
                    pub $field: $type,
                )*
            }

            impl $name {
                structs!(@initializer $($field $(= $initial)?;)*);

                const FIELDS: &[Field] = &[$(Field {
                    name: stringify!($field),
                    type_name: stringify!($type),
                    offset: offset_of!($name, $field),
                    initial: structs!(@text $($initial)?),
                    presence: presence!($(since($($since),*))?),
                }),*];
            }
        )*

        pub(crate) const DECLARED: &[Struct] = &[$(Struct {
            name: stringify!($name),
            fields: $name::FIELDS,
            presence: presence!($(since($($first),*))?),
        }),*];
    };
    (@text) => { None };
    (@text $initial:expr) => { Some(stringify!($initial)) };
    (@initializer $($field:ident = $initial:expr;)*) => {
        /// The value of the initializer in the header of [`Version::NEWEST`]: every option is left to NCCL.
        pub const INITIALIZER: Self = Self { $($field: $initial),* };

        /// The initializer for a library of this version. Size and version are those of that library's own struct, so
        /// the library reads no field that it does not know. A value in such a field has no effect.
        #[must_use]
        pub fn fitting(library: Version) -> Self {
            let known = library.min(Version::NEWEST);
            Self { size: known_bytes::<Self>(Self::FIELDS, known), version: known.code(), ..Self::INITIALIZER }
        }
    };
    (@initializer $($field:ident;)*) => {};
}
