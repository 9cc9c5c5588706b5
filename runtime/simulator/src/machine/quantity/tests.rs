use super::super::{Bytes, BytesPerSecond, Count, FlopPerSecond, Measure, Ratio, Seconds};
use super::{Quantity, parse, text};

fn read<M: Measure>(text: &str) -> Result<f64, String> {
    Quantity::<M>::read(text, "a test".into()).map(|it| it.value())
}

#[test]
fn texts_have_a_unit_and_a_prefix() {
    assert_eq!(read::<FlopPerSecond>("312 Tflop/s"), Ok(312e12));
    assert_eq!(read::<BytesPerSecond>("1.555 TB/s"), Ok(1.555e12));
    assert_eq!(read::<BytesPerSecond>("200 Gb/s"), Ok(25e9));
    assert_eq!(read::<BytesPerSecond>("33 GiB/s"), Ok(33.0 * 1024.0 * 1024.0 * 1024.0));
    assert_eq!(read::<Bytes>("80 GB"), Ok(80e9));
    assert_eq!(read::<Seconds>("3.4 us"), Ok(3.4e-6));
    assert_eq!(read::<Seconds>("0 s"), Ok(0.0));
    assert_eq!(read::<Seconds>("2.5e-7 s"), Ok(2.5e-7));
    assert_eq!(read::<Ratio>("0.72"), Ok(0.72));
    assert_eq!(read::<Count>("8"), Ok(8.0));
}

#[test]
fn impossible_values_are_refused() {
    assert_eq!(
        read::<BytesPerSecond>("-5 GB/s"),
        Err("\"-5 GB/s\" is not between 1 kB/s and 1 EB/s".into())
    );
    assert_eq!(read::<Ratio>("1.01"), Err("\"1.01\" is not between 0.000001 and 1".into()));
    assert_eq!(read::<Count>("1.5"), Err("\"1.5\" is no whole number".into()));
    for text in ["0 GB/s", "-1 B/s", "1e400 B/s", "2 EB/s"] {
        assert!(read::<BytesPerSecond>(text).is_err(), "{text}");
    }
    assert!(read::<Seconds>("-1 us").is_err());
    assert!(read::<Seconds>("2 s").is_err());
    assert!(read::<Count>("0").is_err());
    assert!(read::<Ratio>("0").is_err());
}

#[test]
fn texts_without_their_unit_are_refused() {
    assert_eq!(
        read::<BytesPerSecond>("5 GB"),
        Err("\"5 GB\" is no number with a unit such as GB/s".into())
    );
    assert_eq!(read::<Ratio>("85 %"), Err("\"85 %\" is no plain number such as 0.85".into()));
    for text in
        ["5", "GB/s", "", "5GB/s", "nan GB/s", "inf B/s", "5 mB/s", "5  GB/s", "5 GB/s ", "1_0 B/s"]
    {
        assert!(read::<BytesPerSecond>(text).is_err(), "{text:?}");
    }
    assert!(read::<Seconds>("5 ks").is_err());
}

#[test]
fn a_source_is_required() {
    for source in ["", " "] {
        let problem = Quantity::<Ratio>::read("0.5", source.into()).expect_err("no source");
        assert_eq!(problem, "\"0.5\" has an empty source");
    }
}

proptest::proptest! {
    #[test]
    fn a_displayed_value_is_read_as_the_same_number(mantissa in 1.0..10.0_f64, power in 3..18_i32) {
        let large = mantissa * 10_f64.powi(power);
        let small = mantissa * 10_f64.powi(-power);
        assert_eq!(parse(&text(large, &Bytes::UNIT), &Bytes::UNIT), Ok(large));
        assert_eq!(parse(&text(small, &Seconds::UNIT), &Seconds::UNIT), Ok(small));
        assert_eq!(parse(&text(1.0 / mantissa, &Ratio::UNIT), &Ratio::UNIT), Ok(1.0 / mantissa));
    }
}

#[test]
fn values_are_displayed_in_the_largest_fitting_prefix() {
    assert_eq!(text(312e12, &FlopPerSecond::UNIT), "312 Tflop/s");
    assert_eq!(text(2.039e12, &BytesPerSecond::UNIT), "2.039 TB/s");
    assert_eq!(text(3.4e-6, &Seconds::UNIT), "3.4 us");
    assert_eq!(text(1.25e-4, &Seconds::UNIT), "125 us");
    assert_eq!(text(0.0, &Seconds::UNIT), "0 s");
    assert_eq!(text(2e-14, &Seconds::UNIT), "0.00000000000002 s");
    assert_eq!(text(0.72, &Ratio::UNIT), "0.72");
}
