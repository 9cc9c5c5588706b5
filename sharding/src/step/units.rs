//! The units that ranks need in a forward that finds the order, and the conclusion from them.

use crate::{Rank, UnitId};

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
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// the rank has used before, which are the first ones of the `declared` order. Returns the number
    /// of units after which the conclusion comes, and the conclusion. A rank that has used more units
    /// needs the declared one there.
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
