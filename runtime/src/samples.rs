//! Which data a rank has in a step, by a digest: so that two ranks with the same are found. PROTOCOL.md, "A step".

use hsdp_comm::{Stage, Tag};
use hsdp_sharding::Rank;
use xxhash_rust::xxh3::Xxh3;

use crate::engine::control::Control;
use crate::error::Error;
use crate::header::{Agreed, Intent, StepHeader};
use crate::uneven::Input;

/// What a rank says that has named none.
const NONE: u64 = 0;

/// A digest of which samples a rank has in a step.
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
    /// Of their numbers in the data, in the order in which the step has them. Of no sample at all it is like that of no other rank.
    pub fn of(numbers: impl IntoIterator<Item = u64>) -> Self {
        let mut numbers = numbers.into_iter().peekable();
        if numbers.peek().is_none() {
            return Self(NONE);
        }
        let mut hasher = Xxh3::new();
        numbers.for_each(|number| hasher.update(&number.to_le_bytes()));
        Self(hasher.digest().max(NONE + 1))
    }
}

/// Hears which samples each rank has, where the headers say that one of them has named its own. Collective over the world then.
///
/// # Errors
/// [`Error::SameSamples`] on all ranks; [`Error::Comm`].
pub(crate) fn compare(
    control: &Control,
    header: &StepHeader,
    agreed: &Agreed,
) -> Result<(), Error> {
    if !agreed.compares_samples {
        return Ok(());
    }
    let step = header.step;
    let mine = header.samples.filter(|_| header.intent == Intent::Step(Input::Ready));
    let said = mine.map_or(NONE, |Samples(digest)| digest);
    match control.exchange(Tag::new(Stage::Header).step(step), [said], twins)? {
        None => Ok(()),
        Some([first, second]) => {
            let [rank, other] = [second, first].map(Rank::new);
            Err(Error::SameSamples { step, rank, other })
        }
    }
}

/// The first two that have named the same.
fn twins(said: &[u64]) -> Option<[usize; 2]> {
    let named = || said.iter().enumerate().filter(|(_, digest)| **digest != NONE);
    named().find_map(|(second, digest)| {
        let first = named().take_while(|(rank, _)| *rank < second).find(|(_, it)| *it == digest);
        first.map(|(first, _)| [first, second])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_two_that_are_the_same_are_found_and_who_named_none_is_not() {
        assert_eq!(twins(&[]), None);
        assert_eq!(twins(&[0, 0, 7, 0]), None);
        assert_eq!(twins(&[5, 0, 7, 5, 7]), Some([0, 3]));
    }
}
