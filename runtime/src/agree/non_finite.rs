//! The record of a sighting that ranks exchange, and the first sighting of all ranks.

use hsdp_sharding::Rank;

use crate::error::non_finite::Origin;
use crate::state::sighting::{Sighting, When};

/// The number of words of a sighting.
pub(crate) const WORDS: usize = 3;
const NONE: u64 = u64::MAX;

impl Sighting {
    pub(crate) fn encode(sighting: Option<Self>) -> [u64; WORDS] {
        let Some(Self { when, parameter, from }) = sighting else { return [NONE; WORDS] };
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

    /// The sighting in the form of the error. `holder` is the rank that made the sighting.
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

/// The first of all ranks' sightings, and the lowest rank that made it.
pub(crate) fn first(sightings: impl Iterator<Item = Option<Sighting>>) -> Option<(Rank, Sighting)> {
    let made = sightings.enumerate().filter_map(|(rank, sighting)| Some((sighting?, rank)));
    made.min().map(|(sighting, rank)| (Rank::new(rank), sighting))
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
        let expected = earliest.map(|sighting| (Rank::new(4), sighting));
        assert_eq!(first(sightings.into_iter()), expected);
        assert_eq!(first([None, None].into_iter()), None);
    }
}
