use super::*;

#[test]
fn codes_are_read_as_nccl_writes_them() {
    for (code, version) in [(23_203, "2.32.3"), (21_801, "2.18.1"), (2804, "2.8.4")] {
        assert_eq!(Version::from_code(code).to_string(), version);
    }
    assert_eq!(Version::new(2, 18, 1).code(), 21_801);
    assert!(Version::from_code(2804) < Version::OLDEST);
}
