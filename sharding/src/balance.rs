//! The split of a range into nearly equal slices.

use std::ops::Range;

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
    let quotient = len / parts;
    let remainder = len % parts;
    let start = index * quotient + index.min(remainder);
    start..start + quotient + usize::from(index < remainder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_follow_each_other_and_differ_by_at_most_one() {
        for (len, parts) in (0..40).flat_map(|len| (1..10).map(move |parts| (len, parts))) {
            let slices: Vec<_> = (0..parts).map(|index| balanced(len, parts, index)).collect();
            assert_eq!((slices[0].start, slices[parts - 1].end), (0, len));
            assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start));
            let longer = slices.iter().filter(|slice| slice.len() == len / parts + 1).count();
            assert_eq!(longer, len % parts);
            assert!(slices.is_sorted_by_key(|slice| std::cmp::Reverse(slice.len())));
        }
    }

    #[test]
    #[should_panic(expected = "slice 3 of a range that is split into 3 slices")]
    fn a_slice_beyond_the_last_panics() {
        let _ = balanced(7, 3, 3);
    }
}
