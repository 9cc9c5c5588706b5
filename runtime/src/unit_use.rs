//! The record of a rank's next unit: 16 bytes that ranks exchange before each gather of the first forward. PROTOCOL.md, "The order of
//! units".

use std::fmt;

use hsdp_sharding::{ModelSpec, Rank, UnitId};

use crate::error::Error;
use crate::microbatch_header::check_magic;

const WORDS: usize = 2;
const MAGIC: u64 = u64::from_be_bytes(*b"hsdp-un1");
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
    /// They differ: the first rank with a forward, and the first one that differs from it.
    Differ([(Rank, UnitUse); 2]),
}

impl UnitUse {
    pub(crate) fn encode(self) -> [u64; WORDS] {
        let word = match self {
            Self::Follows => FOLLOWS,
            Self::Ends => ENDS,
            Self::Needs(unit) => FIRST_UNIT + u64::from(unit.get()),
        };
        [MAGIC, word]
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

/// Decodes and compares the records of all ranks.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn decide(gathered: &[u64], own: Rank) -> Result<NextUnit, Error> {
    check_magic(gathered, (WORDS, MAGIC), ("the protocol of the unit records", own))?;
    let records = gathered.chunks_exact(WORDS);
    let uses = (0..).map(Rank::new).zip(records.map(|record| UnitUse::decode(record[1])));
    let mut uses = uses.filter(|(_, said)| *said != UnitUse::Follows);
    let Some(first) = uses.next() else { return Ok(NextUnit::Over) };
    Ok(match (uses.find(|(_, said)| *said != first.1), first.1) {
        (Some(other), _) => NextUnit::Differ([first, other]),
        (None, UnitUse::Needs(unit)) => NextUnit::Gather(unit),
        (None, _) => NextUnit::Over,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: UnitUse = UnitUse::Needs(UnitId::new(7));

    fn decided(said: &[UnitUse]) -> NextUnit {
        let words: Vec<u64> = said.iter().flat_map(|said| said.encode()).collect();
        decide(&words, Rank::new(0)).expect("one protocol")
    }

    #[test]
    fn ranks_without_a_forward_follow_the_others() {
        use UnitUse::{Ends, Follows};
        assert_eq!(decided(&[Follows, NEEDS, NEEDS]), NextUnit::Gather(UnitId::new(7)));
        assert_eq!(decided(&[Ends, Follows]), NextUnit::Over);
        assert_eq!(decided(&[Follows, Follows]), NextUnit::Over);
    }

    #[test]
    fn the_first_ranks_that_differ_are_named() {
        let other = UnitUse::Needs(UnitId::new(0));
        let differ =
            |first, second| NextUnit::Differ([(Rank::new(1), first), (Rank::new(2), second)]);
        assert_eq!(decided(&[UnitUse::Follows, NEEDS, other, UnitUse::Ends]), differ(NEEDS, other));
        assert_eq!(
            decided(&[UnitUse::Follows, NEEDS, UnitUse::Ends]),
            differ(NEEDS, UnitUse::Ends)
        );
    }

    #[test]
    fn another_protocol_is_named() {
        let mut words = [NEEDS, NEEDS].map(UnitUse::encode).concat();
        words[2] += 1;
        let message = decide(&words, Rank::new(0)).unwrap_err().to_string();
        let expected = "the protocol of the unit records differs between ranks: rank 1 has 0x";
        assert!(message.starts_with(expected), "{message}");
    }
}
