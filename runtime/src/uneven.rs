//! Runs in which some ranks have more data than others. PROTOCOL.md, "A step".

use hsdp_sharding::Rank;

use crate::error::Error;
use crate::objective::Objective;

/// The policy for steps in which some ranks have data and others have none. The same on all ranks; the ranks compare it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Uneven {
    /// [`Error::UnevenInputs`] on all ranks, which lists the ranks with data and the ranks without.
    #[default]
    Error,
    /// The run ends on all ranks when the first rank has no more data. No item counts twice; the remaining data of the other ranks is
    /// not used. A step without a given number of microbatches ends in the same way.
    Stop,
    /// Ranks without data take part with weight 0 until no rank has data. Gradients are those of the available data, and
    /// every rank updates its shards. Not allowed with the objective `RankMean`, in which weights do not enter.
    ZeroWeight,
}

impl Uneven {
    /// Refuses a policy that the objective does not allow.
    pub(crate) fn check(self, objective: Objective) -> Result<Self, Error> {
        match (self, objective) {
            (Self::ZeroWeight, Objective::RankMean) => Err(Error::Options {
                what: "Uneven::ZeroWeight with the objective RankMean: a rank without data has no mean; use \
                       WeightedMean, Sum or Factor"
                    .to_owned(),
            }),
            (policy, _) => Ok(policy),
        }
    }
}

/// Whether a rank asks that the run end although it has data, after a SIGTERM for example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    /// The rank does not ask.
    #[default]
    NotAsked,
    /// The rank asks that the step that begins be the last.
    Asked,
}

/// Whether a rank has data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Input {
    /// The rank has data.
    #[default]
    Ready,
    /// The rank has no more data.
    Exhausted,
}

/// The ranks that have data and the ranks that have none, from the headers of all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Supply {
    /// Ranks with data.
    pub ready: Vec<Rank>,
    /// Ranks without data.
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
    /// The supply of these inputs, in rank order. Reuses the memory of `self`.
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

    /// The course that follows; `None` if the policy refuses the supply.
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

/// The end of a run, where the next step would begin. The same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndOfRun {
    /// The number of the step that does not take place.
    pub step: u64,
    /// The ranks that still have data, which is not used, and the ranks that have none.
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
