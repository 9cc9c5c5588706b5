use super::*;

#[test]
fn a_mode_reads_what_it_writes() {
    for mode in Accumulation::ALL {
        assert_eq!(mode.to_string().parse::<Accumulation>(), Ok(mode));
    }
    for copies in FullCopies::ALL {
        assert_eq!(copies.to_string().parse::<FullCopies>(), Ok(copies));
    }
    let error = "never".parse::<Accumulation>().unwrap_err().to_string();
    let expected =
        "`never` is not a valid accumulation mode: expected reduce-scatter, every or local";
    assert_eq!(error, expected);
}
