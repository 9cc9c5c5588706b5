//! Which ranks have data, and what follows from it.

use crate::Rank;

/// The policy for steps in which some ranks have data and others have none. It is equal on all
/// ranks, which compare it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Uneven {
    /// An error on all ranks, which lists the ranks with data and the ranks without.
    #[default]
    Error,
    /// The run ends on all ranks when the first rank has no more data. No item counts twice; the
    /// remaining data of the other ranks is not used. A step without a given number of microbatches
    /// ends in the same way.
    Stop,
    /// Ranks without data take part with weight 0 until no rank has data. Gradients are those of
    /// the available data, and every rank updates its shards. Not allowed for an objective in which
    /// weights do not enter.
    ZeroWeight,
}

/// Whether a rank has data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Input {
    /// The rank has data.
    #[default]
    Ready,
    /// The rank has no more data.
    Exhausted,
}

/// The ranks that have data and the ranks that have none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Supply {
    /// Ranks with data.
    pub ready: Vec<Rank>,
    /// Ranks without data.
    pub exhausted: Vec<Rank>,
}

/// Whether there is a next step, or a next microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// All ranks go on.
    Goes,
    /// All ranks end here.
    Ends,
}

impl Supply {
    /// Returns the supply of these inputs, in rank order.
    pub fn of(inputs: impl Iterator<Item = Input>) -> Self {
        let mut supply = Self::default();
        for (rank, input) in inputs.enumerate() {
            match input {
                Input::Ready => supply.ready.push(Rank::new(rank)),
                Input::Exhausted => supply.exhausted.push(Rank::new(rank)),
            }
        }
        supply
    }

    /// Returns the course that follows; `None` if the policy refuses the supply.
    #[must_use]
    pub fn course(&self, policy: Uneven) -> Option<Course> {
        match policy {
            _ if self.exhausted.is_empty() => Some(Course::Goes),
            _ if self.ready.is_empty() => Some(Course::Ends),
            Uneven::Error => None,
            Uneven::Stop => Some(Course::Ends),
            Uneven::ZeroWeight => Some(Course::Goes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supply(inputs: [Input; 3]) -> Supply {
        Supply::of(inputs.into_iter())
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
        let supply = supply([Input::Ready, Input::Exhausted, Input::Ready]);
        assert_eq!(supply.ready, [0, 2].map(Rank::new));
        assert_eq!(supply.exhausted, [1].map(Rank::new));
    }
}
