//! Ranks that have more data than others: who says so, and what follows. PROTOCOL.md, "A step".

use hsdp_sharding::Rank;

use crate::error::Error;
use crate::objective::Objective;

/// What happens when some ranks have data and others have none. The same on all ranks; they compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Uneven {
    /// [`Error::UnevenInputs`] on all ranks, naming who has data and who has not.
    #[default]
    Error,
    /// The run ends on all ranks when the first is out, so that no item counts twice; what others still have is
    /// left over. Within a step of as many microbatches as come, the step ends likewise.
    Stop,
    /// Ranks without data go on with weight 0 until all are out: gradients are those of the data that there is, and
    /// every rank updates its shards. Needs an objective that weights enter, so not `RankMean`.
    ZeroWeight,
}

impl Uneven {
    /// Refuses what has no meaning together.
    pub(crate) fn check(self, objective: Objective) -> Result<Self, Error> {
        match (self, objective) {
            (Self::ZeroWeight, Objective::RankMean) => Err(Error::Options {
                what: "Uneven::ZeroWeight with the objective RankMean: a rank without data has no mean; take \
                       WeightedMean, Sum or Factor"
                    .to_owned(),
            }),
            (policy, _) => Ok(policy),
        }
    }
}

/// Whether a rank asks that the run end: it was told to (SIGTERM), and has data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    /// It does not.
    #[default]
    NotAsked,
    /// The step that begins is to be the last one.
    Asked,
}

/// Whether a rank has data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Input {
    /// It has some.
    #[default]
    Ready,
    /// It has none any more.
    Exhausted,
}

/// Which ranks have data and which have not: what a header told all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Supply {
    /// Ranks with data.
    pub ready: Vec<Rank>,
    /// Ranks without.
    pub exhausted: Vec<Rank>,
}

/// Whether there is a next step, or a next microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// All ranks go on.
    Goes,
    /// All ranks end here.
    Ends,
}

impl Supply {
    /// What all ranks said, in rank order; in the memory of a supply of before.
    pub(crate) fn renewed(self, said: impl Iterator<Item = Input>) -> Self {
        let mut supply = self;
        supply.ready.clear();
        supply.exhausted.clear();
        for (rank, input) in said.enumerate() {
            match input {
                Input::Ready => supply.ready.push(Rank::new(rank)),
                Input::Exhausted => supply.exhausted.push(Rank::new(rank)),
            }
        }
        supply
    }

    /// What follows from it; `None` if the policy is to refuse it.
    pub(crate) fn course(&self, policy: Uneven) -> Option<Course> {
        match policy {
            _ if self.exhausted.is_empty() => Some(Course::Goes),
            _ if self.ready.is_empty() => Some(Course::Ends),
            Uneven::Error => None,
            Uneven::Stop => Some(Course::Ends),
            Uneven::ZeroWeight => Some(Course::Goes),
        }
    }
}

/// The end of a run: told to all ranks alike, where the next step would begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndOfRun {
    /// The number of the step that does not take place.
    pub step: u64,
    /// Who still has data, which is left over, and who has none.
    pub supply: Supply,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supply(inputs: [Input; 3]) -> Supply {
        Supply::default().renewed(inputs.into_iter())
    }

    #[test]
    fn what_follows_from_who_has_data() {
        use Input::{Exhausted, Ready};
        let course = |inputs| {
            [Uneven::Error, Uneven::Stop, Uneven::ZeroWeight]
                .map(|policy| supply(inputs).course(policy))
        };
        let (goes, ends) = (Some(Course::Goes), Some(Course::Ends));
        assert_eq!(course([Ready, Ready, Ready]), [goes, goes, goes]);
        assert_eq!(course([Ready, Exhausted, Ready]), [None, ends, goes]);
        assert_eq!(course([Exhausted, Exhausted, Exhausted]), [ends, ends, ends]);
    }

    #[test]
    fn ranks_are_named() {
        let before = supply([Input::Exhausted, Input::Ready, Input::Exhausted]);
        let said = [Input::Ready, Input::Exhausted, Input::Ready];
        let supply = before.renewed(said.into_iter());
        assert_eq!(supply.ready, [0, 2].map(Rank::new));
        assert_eq!(supply.exhausted, [1].map(Rank::new));
    }
}
