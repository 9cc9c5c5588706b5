use super::*;

#[test]
fn counts_show_their_unit() {
    assert_eq!(ElemCount(1).to_string(), "1 element");
    assert_eq!(ElemCount(1003).to_string(), "1003 elements");
    let shown = [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (u64::MAX, "16.00 EiB"),
    ];
    for (bytes, text) in shown {
        assert_eq!(ByteCount(bytes).to_string(), text);
    }
}

#[test]
fn elements_become_bytes_by_the_size_of_their_dtype() {
    for dtype in DType::ALL {
        assert_eq!(ElemCount(3).bytes(dtype), ByteCount::of(3 * dtype.size_bytes()));
    }
}

#[test]
fn arithmetic_is_checked() {
    let (small, large) = (ByteCount(1), ByteCount(u64::MAX));
    assert_eq!([small, small].into_iter().sum::<ByteCount>(), small * 2);
    assert_eq!(large - small + small, large);
    assert_eq!(large.checked_add(small), None);
    assert_eq!(small.checked_sub(large), None);
    assert_eq!(large.checked_mul(2), None);
}

#[test]
#[should_panic(expected = "a count of bytes falls below 0")]
fn a_difference_below_zero_panics() {
    let _ = ByteCount(1) - ByteCount(2);
}

#[test]
#[should_panic(expected = "a count of bytes exceeds u64::MAX")]
fn bytes_beyond_u64_panic() {
    let _ = ElemCount(u64::MAX).bytes(DType::F16);
}
