//! The collectives on vectors of any element type, as methods of [`Group`](crate::Group).
//!
//! In reading order: `moving` and `dealing` (elements go as they are), `reducing` (elements are combined), `passing`
//! (vectors change hands), `lending` (some of them again, with buffers that the caller lends).

mod dealing;
mod lending;
mod moving;
mod passing;
mod reducing;

pub(crate) use self::dealing::{Splits, check_pairs};
pub use self::lending::Lent;
pub(crate) use self::passing::sources_of;

/// The bytes of `count` elements.
const fn bytes<T>(count: usize) -> usize {
    count * size_of::<T>()
}
