//! Gradients that are not finite: where the first one came from, as a rank finds it and as all ranks are told.

use std::cmp::Ordering;
use std::fmt;

use hsdp_sharding::Rank;

/// Why a step's gradient, or its loss, is not finite: the first parameter, rank and microbatch.
#[derive(Clone, Debug, PartialEq)]
pub struct NonFiniteGradient {
    /// The step.
    pub step: u64,
    /// What was found first.
    pub origin: Origin,
}

/// Where a gradient stopped being finite.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Origin {
    /// A rank's own gradient holds an infinity or a NaN, or what the wire dtype rounds to an infinity.
    Gradient {
        /// The parameter.
        parameter: String,
        /// The rank.
        rank: Rank,
        /// In this microbatch.
        microbatch: usize,
    },
    /// Contributions were finite, and their sum over ranks and microbatches is not.
    Sum {
        /// The parameter.
        parameter: String,
        /// The rank that holds the sum.
        rank: Rank,
        /// After this microbatch; `None` if it was the all-reduce over the replicas.
        microbatch: Option<usize>,
    },
    /// The sum was finite, and what it was divided by is so small that the quotient need not be.
    Division {
        /// The norm before the division.
        norm: f64,
        /// The divisor.
        divisor: f64,
    },
    /// The gradient is finite, and the loss is not: that of this rank, summed over its microbatches, or that of all ranks
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
                write!(
                    f,
                    "step {step}: the loss of rank {rank} is not finite, though the gradients are"
                )
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

/// What a rank found, in numbers that travel: where the first element that is not finite came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sighting {
    /// The microbatch; after all of them, what the all-reduce brought to light.
    pub(crate) when: When,
    /// The parameter, by its number in the model.
    pub(crate) parameter: usize,
    /// Whose contribution it was; `None` if all were finite.
    pub(crate) from: Option<usize>,
}

/// Of one parameter, what a rank contributed is first: it is why a sum is not finite.
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

/// When a sighting was made. Earlier ones are smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum When {
    Microbatch(usize),
    AllReduce,
}

/// How many words a sighting takes.
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

    /// As it is told: `holder` is the rank that made the sighting.
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

/// The first of all sightings, and the lowest rank that made it.
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
