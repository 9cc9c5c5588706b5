//! The collectives on vectors of any element type, as methods of [`Group`](crate::Group).
//!
//! In reading order: `moving` (elements go as they are), `reducing` (elements are combined), `passing` (vectors change
//! hands).

mod moving;
mod passing;
mod reducing;

/// The bytes of `count` elements.
const fn bytes<T>(count: usize) -> usize {
    count * size_of::<T>()
}
