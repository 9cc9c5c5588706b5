//! The collectives on vectors of any element type, as methods of [`Group`](crate::Group).
//!
//! In reading order: `moving` and `dealing` (elements go as they are), `reducing` (elements are combined), `passing`
//! (vectors change hands), `lending` (some of them again, with buffers that the caller lends).

mod dealing;
mod lending;
mod moving;
mod passing;
mod reducing;

/// The sum of counts that a caller gives; as many as can be counted, if they are more. No buffer has so many elements, so a comparison
/// with a length fails, and so does an allocation.
pub(crate) fn sum_of(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}
