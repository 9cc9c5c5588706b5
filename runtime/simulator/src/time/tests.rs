use super::Time;

fn picoseconds(count: u64) -> Time {
    Time::from_picoseconds(count)
}

#[test]
fn seconds_are_rounded_to_the_nearest_picosecond() {
    assert_eq!(Time::from_seconds(0.0), Some(Time::ZERO));
    assert_eq!(Time::from_seconds(1.5), Some(picoseconds(1_500_000_000_000)));
    assert_eq!(Time::from_seconds(1.4e-12), Some(picoseconds(1)));
    assert_eq!(Time::from_seconds(1.6e-12), Some(picoseconds(2)));
    assert_eq!(picoseconds(2_500_000).seconds(), 2.5e-6);
}

#[test]
fn seconds_that_are_no_time_are_refused() {
    for seconds in [-1.0, -1e-9, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, 18_446_744.08] {
        assert_eq!(Time::from_seconds(seconds), None, "{seconds}");
    }
    assert!(Time::from_seconds(18_446_744.07).is_some());
}

#[test]
fn sums_saturate() {
    assert_eq!(picoseconds(2) + picoseconds(3), picoseconds(5));
    assert_eq!(Time::MAX + picoseconds(1), Time::MAX);
    assert_eq!(picoseconds(2).saturating_sub(picoseconds(3)), Time::ZERO);
    assert_eq!(picoseconds(2) * u64::MAX, Time::MAX);
}

#[test]
fn the_unit_of_a_text_gives_at_least_one() {
    let texts = [
        (0, "0 s"),
        (1, "1 ps"),
        (999, "999 ps"),
        (1_000, "1 ns"),
        (12_345_678, "12.35 us"),
        (1_500_000_000, "1.5 ms"),
        (213_000_000_000_000, "213 s"),
        (12_000_000_000_000_000, "12000 s"),
    ];
    for (count, text) in texts {
        assert_eq!(picoseconds(count).to_string(), text);
    }
    assert_eq!(format!("{:>8}", picoseconds(1)), "    1 ps");
}
