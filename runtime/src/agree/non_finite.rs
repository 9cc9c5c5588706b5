//! Gradients that are not finite: the origin of the first one, in the form of one rank's record and in the form of the error.

use std::cmp::Ordering;
use std::fmt;

use hsdp_sharding::Rank;

/// Why a step's gradient, or its loss, is not finite: the first parameter, rank and microbatch.
#[derive(Clone, Debug, PartialEq)]
pub struct NonFiniteGradient {
    /// The step.
    pub step: u64,
    /// The first value that was found not to be finite.
    pub origin: Origin,
}

/// The operation whose result was the first that is not finite.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Origin {
    /// A rank's own gradient holds an infinity, a NaN, or a value that the wire dtype rounds to an infinity.
    Gradient {
        /// The parameter.
        parameter: String,
        /// The rank.
        rank: Rank,
        /// The microbatch.
        microbatch: usize,
    },
    /// The contributions are finite, but their sum over ranks and microbatches is not.
    Sum {
        /// The parameter.
        parameter: String,
        /// The rank that holds the sum.
        rank: Rank,
        /// The microbatch after which the sum is not finite; `None` for the all-reduce over the replicas.
        microbatch: Option<usize>,
    },
    /// The sum is finite, but the divisor is so small that the quotient may not be finite in f32.
    Division {
        /// The norm before the division.
        norm: f64,
        /// The divisor.
        divisor: f64,
    },
    /// The gradient is finite, but the loss is not: the sum over the microbatches of this rank, or the running sum over the ranks
    /// up to this one.
    Loss {
        /// The first such rank.
        rank: Rank,
    },
}

impl fmt::Display for NonFiniteGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.step;
        match &self.origin {
            Origin::Gradient { parameter, rank, microbatch } => write!(
                f,
                "step {step}: the gradient of {parameter} on rank {rank} in microbatch {microbatch} is not finite"
            ),
            Origin::Sum { parameter, rank, microbatch: Some(microbatch) } => write!(
                f,
                "step {step}: the sum of the gradients of {parameter} is not finite after microbatch {microbatch} \
                 on rank {rank}, though each of them is"
            ),
            Origin::Sum { parameter, rank, microbatch: None } => write!(
                f,
                "step {step}: the sum over the replicas of the gradients of {parameter} is not finite on rank \
                 {rank}, though each of them is"
            ),
            Origin::Loss { rank } => {
                write!(f, "step {step}: the loss of rank {rank} is not finite")
            }
            Origin::Division { norm, divisor } => {
                write!(
                    f,
                    "step {step}: a gradient of norm {norm:e} is not finite when divided by {divisor:e}"
                )
            }
        }
    }
}

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

/// For one parameter, a rank's contribution comes before a sum, because it is the reason for the sum.
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
        Some(Self { when, parameter: number(words[1])?, from: number(words[2]) })
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
