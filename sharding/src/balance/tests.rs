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
