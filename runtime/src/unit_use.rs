//! The record of a rank's next unit: 24 bytes that ranks exchange where the first forward leaves the declared order, and before each
//! gather after that. PROTOCOL.md, "The order of units".

use std::fmt;

use hsdp_sharding::{ModelSpec, Rank, UnitId};

use crate::error::Error;
use crate::microbatch_header::check_magic;

const WORDS: usize = 3;
const MAGIC: u64 = u64::from_be_bytes(*b"hsdp-un2");
const FOLLOWS: u64 = 0;
const ENDS: u64 = 1;
const FIRST_UNIT: u64 = 2;

/// A rank's next operation in the first forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitUse {
    /// The rank needs this unit.
    Needs(UnitId),
    /// Its forward is over.
    Ends,
    /// The rank has no forward, and gathers the units that the others need.
    Follows,
}

/// The conclusion of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NextUnit {
    /// All ranks with a forward need this unit.
    Gather(UnitId),
    /// The forward is over on all of them.
    Over,
    /// No rank has a forward.
    Nothing,
    /// They differ: the first rank with a forward, and the first one that differs from it.
    Differ([(Rank, UnitUse); 2]),
}

impl UnitUse {
    /// The record of a rank for which this comes after `place` units.
    pub(crate) fn encode(self, place: usize) -> [u64; WORDS] {
        let word = match self {
            Self::Follows => FOLLOWS,
            Self::Ends => ENDS,
            Self::Needs(unit) => FIRST_UNIT + u64::from(unit.get()),
        };
        [MAGIC, word, place as u64]
    }

    fn decode(word: u64) -> Self {
        match word {
            FOLLOWS => Self::Follows,
            ENDS => Self::Ends,
            unit => {
                let index = usize::try_from(unit - FIRST_UNIT).expect("a unit's number is 32 bits");
                Self::Needs(UnitId::new(index))
            }
        }
    }

    /// The text of a warning.
    pub(crate) fn in_words<'a>(self, spec: &'a ModelSpec) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| match self {
            Self::Needs(unit) => write!(f, "needs unit {}", spec[unit].name),
            Self::Ends => f.write_str("has ended its forward"),
            Self::Follows => f.write_str("has no forward"),
        })
    }
}

/// Decodes and compares the records of all ranks, which have used the first units of the `declared` order so far, each as many as it
/// says: the conclusion, and the number of units after which it comes. A rank that says more units needs the next one there.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn decide(
    gathered: &[u64],
    declared: &[UnitId],
    own: Rank,
) -> Result<(usize, NextUnit), Error> {
    check_magic(gathered, (WORDS, MAGIC), ("the protocol of the unit records", own))?;
    let records = gathered.chunks_exact(WORDS).map(|it| (UnitUse::decode(it[1]), it[2]));
    let said: Vec<_> = (0..).map(Rank::new).zip(records).collect();
    let has_forward = |(_, (said, _)): &&(Rank, (UnitUse, u64))| *said != UnitUse::Follows;
    let places = said.iter().filter(has_forward).map(|(_, (_, place))| *place);
    let first = places.min().unwrap_or(0);
    let place = usize::try_from(first).expect("a model has fewer units");
    let uses = said.iter().filter(has_forward).map(|(rank, (said, at))| {
        (*rank, if *at == first { *said } else { UnitUse::Needs(declared[place]) })
    });
    Ok((place, compared(uses)))
}

/// The conclusion from the uses of the ranks that have a forward.
fn compared(mut uses: impl Iterator<Item = (Rank, UnitUse)>) -> NextUnit {
    let Some(first) = uses.next() else { return NextUnit::Nothing };
    match (uses.find(|(_, said)| *said != first.1), first.1) {
        (Some(other), _) => NextUnit::Differ([first, other]),
        (None, UnitUse::Needs(unit)) => NextUnit::Gather(unit),
        (None, _) => NextUnit::Over,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: UnitUse = UnitUse::Needs(UnitId::new(7));

    /// The conclusion of ranks that say this after as many units.
    fn decided(said: &[(UnitUse, usize)]) -> (usize, NextUnit) {
        let declared: Vec<_> = (0..9).map(UnitId::new).collect();
        let words: Vec<u64> = said.iter().flat_map(|(said, place)| said.encode(*place)).collect();
        decide(&words, &declared, Rank::new(0)).expect("one protocol")
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

    #[test]
    fn another_protocol_is_named() {
        let mut words = [NEEDS, NEEDS].map(|said| said.encode(0)).concat();
        words[3] += 1;
        let message = decide(&words, &[], Rank::new(0)).unwrap_err().to_string();
        let expected = "the protocol of the unit records differs between ranks: rank 1 has 0x";
        assert!(message.starts_with(expected), "{message}");
    }
}
