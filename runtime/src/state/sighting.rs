//! The origin of an element that is not finite, as a rank notes it.

use std::cmp::Ordering;

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
