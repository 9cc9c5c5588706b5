use super::*;

#[test]
fn names_tell_size_and_kind() {
    for dtype in DType::ALL {
        let bits: usize = dtype.name().trim_start_matches(char::is_alphabetic).parse().unwrap();
        assert_eq!(dtype.size_bytes() * 8, bits);
        assert_eq!(dtype.is_float(), dtype.name().contains('f'));
    }
}
