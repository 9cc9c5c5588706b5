//! The split of a range into nearly equal slices.

use std::ops::Range;

#[cfg(test)]
mod tests;

/// The `index`-th of `parts` consecutive slices of `0..len`, whose lengths differ by at most one:
/// the first `len % parts` slices have one element more.
///
/// ```
/// use hsdp_sharding::balanced;
/// let slices: Vec<_> = (0..3).map(|index| balanced(7, 3, index)).collect();
/// assert_eq!(slices, [0..3, 3..5, 5..7]);
/// ```
///
/// # Panics
/// If `index` is not below `parts`.
#[must_use]
pub fn balanced(len: usize, parts: usize, index: usize) -> Range<usize> {
    assert!(index < parts, "slice {index} of a range that is split into {parts} slices");
    let (quotient, remainder) = (len / parts, len % parts);
    let start = index * quotient + index.min(remainder);
    start..start + quotient + usize::from(index < remainder)
}
