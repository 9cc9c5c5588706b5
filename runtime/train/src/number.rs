//! Numbers on a command line, parsed for `value_parser` of clap.

/// Parses a whole number from `LEAST` to `MOST`.
///
/// # Errors
/// A text that states the bounds.
pub fn count<const LEAST: usize, const MOST: usize>(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (LEAST..=MOST).contains(count));
    count.ok_or_else(|| format!("expected a whole number from {LEAST} to {MOST}"))
}

/// Parses a learning rate: a number above 0, also in f32, and at most 1e6.
///
/// # Errors
/// A text that states the bounds.
pub fn learning_rate(text: &str) -> Result<f64, String> {
    const BOUNDS: std::ops::RangeInclusive<f64> = 1e-37..=1e6;
    let number = text.parse().ok().filter(|number: &f64| BOUNDS.contains(number));
    number.ok_or_else(|| "expected a number above 0, from 1e-37 to 1e6".to_owned())
}

/// Parses a number of seconds above 0 and at most 1e9. As a [`Duration`](std::time::Duration) it
/// can be added to a time without overflow.
///
/// # Errors
/// A text that states the bounds.
pub fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0.0 && *seconds <= 1e9);
    seconds.ok_or_else(|| "expected a number of seconds above 0 and at most 1e9".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_within_their_bounds() {
        assert_eq!(["1", "5"].map(count::<1, 5>), [Ok(1), Ok(5)]);
        for wrong in ["0", "6", "-1", "1.0", "18446744073709551616", ""] {
            assert_eq!(count::<1, 5>(wrong), Err("expected a whole number from 1 to 5".to_owned()));
        }
    }

    #[test]
    fn a_nan_is_no_number_of_anything() {
        for wrong in ["nan", "inf", "0", "-1", "one"] {
            assert!(learning_rate(wrong).is_err() && seconds(wrong).is_err(), "{wrong}");
        }
        assert_eq!((learning_rate("1e6"), seconds("1e9")), (Ok(1e6), Ok(1e9)));
        assert!(seconds("1e10").is_err());
    }
}
