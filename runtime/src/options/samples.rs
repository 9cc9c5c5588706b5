//! A digest of a rank's samples in a step.

use xxhash_rust::xxh3::Xxh3;

/// The digest of a rank that has named no samples.
pub(crate) const NONE: u64 = 0;

/// A digest of the samples of one rank in a step.
///
/// ```
/// use hsdp::Samples;
///
/// assert_eq!(Samples::of([3, 1, 2]), Samples::of(vec![3, 1, 2]));
/// assert_ne!(Samples::of([3, 1, 2]), Samples::of([1, 2, 3]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Samples(u64);

impl Samples {
    /// Returns the digest of the samples' numbers in the data set, in the order in which the step
    /// uses them. A digest of no samples counts as different from that of every other rank.
    pub fn of(numbers: impl IntoIterator<Item = u64>) -> Self {
        let mut numbers = numbers.into_iter().peekable();
        if numbers.peek().is_none() {
            return Self(NONE);
        }
        let mut hasher = Xxh3::new();
        numbers.for_each(|number| hasher.update(&number.to_le_bytes()));
        Self(hasher.digest().max(NONE + 1))
    }

    pub(crate) fn digest(self) -> u64 {
        self.0
    }
}
