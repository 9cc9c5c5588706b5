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
