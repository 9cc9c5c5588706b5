use super::*;

#[test]
fn numbers_begin_anew_in_each_epoch_and_never_go_back() {
    let sequence = Sequence::default();
    assert_eq!([sequence.take(0), sequence.take(0), sequence.take(2)], [0, 1, 0]);
    assert_eq!([sequence.take(0), sequence.take(2)], [u64::MAX, 1]);
}

#[test]
fn numbers_that_are_swapped_are_given_once_each_and_forgotten_with_their_epoch() {
    let sequence = Sequence::default();
    sequence.swap_next(0);
    sequence.swap_next(0);
    let numbers = [(); 4].map(|()| sequence.take(0));
    assert_eq!(numbers, [1, 0, 2, 3]);
    sequence.swap_next(1);
    assert_eq!([sequence.take(1), sequence.take(2), sequence.take(2)], [1, 0, 1]);
}
