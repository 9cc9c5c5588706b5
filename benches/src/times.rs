//! What many times of the same come to.

use std::time::Duration;

/// The shortest; zero if there is none.
#[must_use]
pub fn least(times: &[Duration]) -> Duration {
    times.iter().copied().min().unwrap_or_default()
}

/// The one in the middle; zero if there is none.
#[must_use]
pub fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
