//! The origin of an element that is not finite, as a rank notes it and as ranks exchange it, and
//! the first of all ranks.

use std::cmp::Ordering;

use hsdp_sharding::Rank;

use crate::error::gradients::Origin;

/// The origin of the first element that is not finite, as a record of numbers that ranks exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sighting {
    /// The microbatch, or the all-reduce after all microbatches.
    pub(crate) when: When,
    /// The parameter's number in the model.
    pub(crate) parameter: usize,
    /// The rank whose contribution it was; `None` if all contributions were finite.
    pub(crate) from: Option<usize>,
}

/// For one parameter, a rank's contribution comes before a sum, because it is the reason for the
/// sum.
impl Ord for Sighting {
    fn cmp(&self, other: &Self) -> Ordering {
        let key = |it: &Self| (it.when, it.parameter, it.from.is_none(), it.from);
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for Sighting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The time of a sighting. Earlier ones are smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum When {
    Microbatch(usize),
    AllReduce,
}

/// Words of a sighting.
const SIGHTING_WORDS: usize = 3;
const NONE: u64 = u64::MAX;

impl Sighting {
    /// Encodes a sighting as words that ranks exchange.
    pub(crate) fn encode(sighting: Option<Self>) -> [u64; SIGHTING_WORDS] {
        let Some(Self { when, parameter, from }) = sighting else { return [NONE; SIGHTING_WORDS] };
        let when = match when {
            When::Microbatch(microbatch) => microbatch as u64,
            When::AllReduce => NONE,
        };
        [when, parameter as u64, from.map_or(NONE, |rank| rank as u64)]
    }

    pub(crate) fn decode(words: &[u64]) -> Option<Self> {
        let number = |word: u64| usize::try_from(word).ok().filter(|_| word != NONE);
        let when = number(words[0]).map_or(When::AllReduce, When::Microbatch);
        let from = number(words[2]).filter(|rank| u32::try_from(*rank).is_ok());
        Some(Self { when, parameter: number(words[1])?, from })
    }

    /// Returns the sighting in the form of the error. `holder` is the rank that made the sighting.
    pub(crate) fn origin(self, holder: Rank, name_of: impl Fn(usize) -> String) -> Origin {
        let parameter = name_of(self.parameter);
        match (self.from, self.when) {
            (Some(rank), When::Microbatch(microbatch)) => {
                Origin::Gradient { parameter, rank: Rank::new(rank), microbatch }
            }
            (_, When::Microbatch(microbatch)) => {
                Origin::Sum { parameter, rank: holder, microbatch: Some(microbatch) }
            }
            (_, When::AllReduce) => Origin::Sum { parameter, rank: holder, microbatch: None },
        }
    }
}

/// A sighting, and the rank that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundOn {
    pub(crate) rank: Rank,
    pub(crate) sighting: Sighting,
}

/// Returns the first of all ranks' sightings, and the lowest rank that made it.
pub(crate) fn first_sighting(sightings: impl Iterator<Item = Option<Sighting>>) -> Option<FoundOn> {
    let made = sightings.enumerate().filter_map(|(rank, sighting)| Some((sighting?, rank)));
    made.min().map(|(sighting, rank)| FoundOn { rank: Rank::new(rank), sighting })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(when: When, parameter: usize, from: Option<usize>) -> Option<Sighting> {
        Some(Sighting { when, parameter, from })
    }

    #[test]
    fn a_sighting_comes_back() {
        let sightings = [
            None,
            found(When::Microbatch(0), 0, Some(0)),
            found(When::Microbatch(3), 7, None),
            found(When::AllReduce, 2, None),
        ];
        for sighting in sightings {
            assert_eq!(Sighting::decode(&Sighting::encode(sighting)), sighting);
        }
    }

    #[test]
    fn a_sighting_from_no_rank_is_one_of_a_sum() {
        let decoded = Sighting::decode(&[3, 7, 1 << 40]);
        assert_eq!(decoded, found(When::Microbatch(3), 7, None));
    }

    #[test]
    fn the_first_is_that_of_the_earliest_microbatch_then_of_the_first_parameter() {
        let late = found(When::AllReduce, 0, None);
        let second = found(When::Microbatch(1), 0, Some(0));
        let other = found(When::Microbatch(0), 5, Some(1));
        let earliest = found(When::Microbatch(0), 4, Some(3));
        let sightings = [None, late, second, other, earliest, earliest];
        let expected = earliest.map(|sighting| FoundOn { rank: Rank::new(4), sighting });
        assert_eq!(first_sighting(sightings.into_iter()), expected);
        assert_eq!(first_sighting([None, None].into_iter()), None);
    }
}
