//! The least and the median of many times.

use std::time::Duration;

/// The shortest time; zero if there is none.
#[must_use]
pub fn least(times: &[Duration]) -> Duration {
    times.iter().copied().min().unwrap_or_default()
}

/// The time in the middle; zero if there is none.
#[must_use]
pub fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
