//! Exchanges of records between all ranks, and the conclusions that all ranks draw from them.

use std::fmt;

use super::rules::{Input, Supply};
use crate::{BufferRule, ModelSpec, Param, Rank, UnitId};

/// An exchange of records between all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Step headers.
    Headers,
    /// Digests of samples, if a header names some.
    Samples,
    /// Digests of the shards of replicas, and of the buffers if the model has any.
    Replicas,
    /// Whether the rank has another microbatch.
    Microbatch(Input),
    /// The unit that the rank needs next, in a forward that finds the order.
    Unit {
        /// Next operation of the rank.
        says: UnitUse,
        /// Number of units that it has used before.
        place: usize,
    },
    /// The weights of the first microbatch.
    Weights,
    /// Overflows of partials.
    Interim {
        /// Number of all-reduces that the rank has issued.
        all_reduces: usize,
    },
    /// The end of the step.
    Statement,
    /// Whether the rank has another batch of an evaluation.
    Batch(Input),
    /// The end of an evaluation: sums for its mean, or zeros if it ends without one.
    Mean,
}

impl Exchange {
    /// Returns whether the conclusion is one of this exchange.
    pub(super) fn has(self, conclusion: &Conclusion) -> bool {
        match self {
            Self::Headers => matches!(conclusion, Conclusion::Headers(_)),
            Self::Microbatch(_) => matches!(conclusion, Conclusion::Supply(_)),
            Self::Batch(_) => matches!(conclusion, Conclusion::Batches(_)),
            Self::Unit { .. } => matches!(conclusion, Conclusion::Unit(..)),
            Self::Interim { .. } => matches!(conclusion, Conclusion::Overflow(_)),
            _ => *conclusion == Conclusion::Agreed,
        }
    }
}

/// Shows the word of the exchange: see [the table](super#text).
impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Headers => f.write_str("<headers>"),
            Self::Samples => f.write_str("<samples>"),
            Self::Replicas => f.write_str("<replicas>"),
            Self::Microbatch(Input::Ready) => f.write_str("<microbatch>"),
            Self::Microbatch(Input::Exhausted) => f.write_str("<no microbatch>"),
            Self::Unit { says: UnitUse::Needs(unit), .. } => write!(f, "<unit {unit}>"),
            Self::Unit { says: UnitUse::Ends, .. } => f.write_str("<no unit>"),
            Self::Unit { says: UnitUse::Follows, .. } => f.write_str("<any unit>"),
            Self::Weights => f.write_str("<weights>"),
            Self::Interim { .. } => f.write_str("<interim>"),
            Self::Statement => f.write_str("<statement>"),
            Self::Batch(Input::Ready) => f.write_str("<batch>"),
            Self::Batch(Input::Exhausted) => f.write_str("<no batch>"),
            Self::Mean => f.write_str("<mean>"),
        }
    }
}

/// Numbers of u64 in the record of a rank.
impl Exchange {
    /// In a step header.
    pub const HEADER: usize = 9;
    /// In a microbatch header, and in that of a batch.
    pub const MICROBATCH: usize = 2;
    /// In the record of a rank's next unit.
    pub const UNIT: usize = 3;
    /// In an interim record.
    pub const INTERIM: usize = 4;
    /// In a statement, without the bits of its parameters and the words of its buffers.
    pub const STATEMENT: usize = 9;
    /// In the record at the end of an evaluation.
    pub const MEAN: usize = 5;

    /// Returns the number of u64 in the record of a rank that trains this model.
    #[must_use]
    pub fn words(self, model: &ModelSpec) -> usize {
        match self {
            Self::Headers => Self::HEADER,
            Self::Samples | Self::Weights => 1,
            Self::Replicas => 1 + usize::from(model.buffers().next().is_some()),
            Self::Microbatch(_) | Self::Batch(_) => Self::MICROBATCH,
            Self::Unit { .. } => Self::UNIT,
            Self::Interim { .. } => Self::INTERIM,
            Self::Statement => {
                let presence = model.params().count().div_ceil(u64::BITS as usize);
                Self::STATEMENT + presence + Self::buffer_words(model)
            }
            Self::Mean => Self::MEAN,
        }
    }

    /// Returns the number of u64 in a statement about buffers: none if the model has no buffer,
    /// else the number of microbatches, the number of those that wrote each buffer, a digest of
    /// each that ranks write equally, and the values of those that are averaged, two f32 in a word.
    #[must_use]
    pub fn buffer_words(model: &ModelSpec) -> usize {
        let buffers = model.buffers().count();
        let digests = model.buffers_of(BufferRule::Equal).count();
        let averaged: usize = model.buffers_of(BufferRule::Averaged).map(Param::numel).sum();
        usize::from(buffers > 0) + buffers + digests + averaged.div_ceil(2)
    }
}

/// Conclusion from the headers of all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    /// Ranks with and without data. A rank that ends its run has none.
    pub supply: Supply,
    /// Ranks that end their run.
    pub ending: Vec<Rank>,
    /// Largest hint of the weight of a microbatch; 0 if no rank gave one.
    pub weight_hint: u64,
    /// Whether a rank names its samples, which are compared then.
    pub names_samples: bool,
    /// Whether a rank has lost a gather of slices: then all ranks gather all slices once more.
    pub gathers_again: bool,
}

impl Headers {
    /// Returns the headers of `ranks` ranks, which all have data, name no samples and give no hint.
    #[must_use]
    pub fn of_data(ranks: usize) -> Self {
        let supply = Supply::of((0..ranks).map(|_| Input::Ready));
        Self { supply, ..Self::default() }
    }
}

/// Conclusion from the records of all ranks about the next batch of an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batches {
    /// Ranks with and without another batch.
    pub supply: Supply,
    /// Whether a rank has lost a gather of slices: then all ranks gather all slices once more,
    /// unless no rank has another batch.
    pub gathers_again: bool,
}

/// The conclusion of all ranks from the records that they have exchanged. It is equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// From [`Exchange::Headers`].
    Headers(Headers),
    /// From [`Exchange::Microbatch`].
    Supply(Supply),
    /// From [`Exchange::Batch`].
    Batches(Batches),
    /// From [`Exchange::Unit`]: the place after which it comes, and what follows there.
    Unit(usize, NextUnit),
    /// From [`Exchange::Interim`]: the largest number of all-reduces that a rank has issued, if a
    /// partial has overflowed on some rank.
    Overflow(Option<usize>),
    /// From any other exchange: the ranks agree.
    Agreed,
}

/// A rank's next operation in a forward that finds the order of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitUse {
    /// The rank needs this unit.
    Needs(UnitId),
    /// Its forward is over.
    Ends,
    /// The rank has no forward, and gathers the units that the others need.
    Follows,
}

/// The conclusion of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextUnit {
    /// All ranks with a forward need this unit.
    Gather(UnitId),
    /// The forward is over on all of them.
    Over,
    /// No rank has a forward.
    Nothing,
    /// They differ: the first rank with a forward, and the first one that differs from it.
    Differ([(Rank, UnitUse); 2]),
}

impl NextUnit {
    /// Concludes from the records of all ranks, in rank order: each with the number of units that
    /// the rank has used before, which are the first ones of the `declared` order. Returns the
    /// number of units after which the conclusion comes, and the conclusion. A rank that has used
    /// more units needs the declared one there.
    ///
    /// # Panics
    /// If a rank has used more units than there are.
    #[must_use]
    pub fn of(records: &[(UnitUse, usize)], declared: &[UnitId]) -> (usize, Self) {
        let ranked = (0..).map(Rank::new).zip(records.iter().copied());
        let with_forward = ranked.filter(|(_, (says, _))| *says != UnitUse::Follows);
        let place = with_forward.clone().map(|(_, (_, place))| place).min().unwrap_or(0);
        let mut uses = with_forward.map(|(rank, (says, at))| {
            (rank, if at == place { says } else { UnitUse::Needs(declared[place]) })
        });
        let Some(first) = uses.next() else { return (place, Self::Nothing) };
        let next = match (uses.find(|(_, says)| *says != first.1), first.1) {
            (Some(other), _) => Self::Differ([first, other]),
            (None, UnitUse::Needs(unit)) => Self::Gather(unit),
            (None, _) => Self::Over,
        };
        (place, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: UnitUse = UnitUse::Needs(UnitId::new(7));

    /// The conclusion of ranks that say this after as many units.
    fn decided(said: &[(UnitUse, usize)]) -> (usize, NextUnit) {
        let declared: Vec<_> = (0..9).map(UnitId::new).collect();
        NextUnit::of(said, &declared)
    }

    #[test]
    fn ranks_without_a_forward_follow_the_others() {
        use UnitUse::{Ends, Follows};
        let gather = NextUnit::Gather(UnitId::new(7));
        assert_eq!(decided(&[(Follows, 0), (NEEDS, 3), (NEEDS, 3)]), (3, gather));
        assert_eq!(decided(&[(Ends, 2), (Follows, 0)]), (2, NextUnit::Over));
        assert_eq!(decided(&[(Follows, 0), (Follows, 0)]), (0, NextUnit::Nothing));
    }

    #[test]
    fn the_first_ranks_that_differ_are_named() {
        use UnitUse::{Ends, Follows};
        let other = UnitUse::Needs(UnitId::new(0));
        let differ =
            |first, second| (3, NextUnit::Differ([(Rank::new(1), first), (Rank::new(2), second)]));
        let said = [(Follows, 0), (NEEDS, 3), (other, 3), (Ends, 3)];
        assert_eq!(decided(&said), differ(NEEDS, other));
        assert_eq!(decided(&[(Follows, 0), (NEEDS, 3), (Ends, 3)]), differ(NEEDS, Ends));
    }

    #[test]
    fn a_rank_that_has_used_more_units_needs_the_declared_one() {
        use UnitUse::Ends;
        let third = UnitUse::Needs(UnitId::new(3));
        let differ = |said| NextUnit::Differ([(Rank::new(0), third), (Rank::new(1), said)]);
        assert_eq!(decided(&[(Ends, 9), (NEEDS, 3)]), (3, differ(NEEDS)));
        assert_eq!(decided(&[(NEEDS, 5), (Ends, 3), (Ends, 4)]), (3, differ(Ends)));
    }
}
