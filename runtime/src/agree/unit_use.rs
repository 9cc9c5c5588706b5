//! The record of a rank's next unit: 24 bytes that ranks exchange where the first forward leaves the declared order, and before each
//! gather after that. PROTOCOL.md, "The order of units".

use hsdp_sharding::step::{Exchange, NextUnit, UnitUse};
use hsdp_sharding::{ModelSpec, Rank, UnitId};

use crate::agree::microbatch_header::check_magic;
use crate::error::Error;

const WORDS: usize = Exchange::UNIT;
const MAGIC: u64 = u64::from_be_bytes(*b"hsdp-un2");
const FOLLOWS: u64 = 0;
const ENDS: u64 = 1;
const FIRST_UNIT: u64 = 2;

/// Returns the record of a rank that says this after `place` units.
pub(crate) fn encode(says: UnitUse, place: usize) -> [u64; WORDS] {
    let word = match says {
        UnitUse::Follows => FOLLOWS,
        UnitUse::Ends => ENDS,
        UnitUse::Needs(unit) => FIRST_UNIT + u64::from(unit.get()),
    };
    [MAGIC, word, place as u64]
}

fn decode(record: &[u64]) -> (UnitUse, usize) {
    let says = match record[1] {
        FOLLOWS => UnitUse::Follows,
        ENDS => UnitUse::Ends,
        unit => {
            let index = usize::try_from(unit - FIRST_UNIT).expect("a unit's number is 32 bits");
            UnitUse::Needs(UnitId::new(index))
        }
    };
    (says, usize::try_from(record[2]).expect("a model has fewer units"))
}

/// Warns that the declared order stays, because ranks use the units in different orders: two of them
/// do what is said here.
pub(crate) fn warn(step: u64, ranks: [(Rank, UnitUse); 2], spec: &ModelSpec) {
    let [(one, first), (other, second)] = ranks;
    let [first, second] = [first, second].map(|says| in_words(says, spec));
    hsdp_warnings::warn!(
        step,
        "ranks use the units of the model in different orders: rank {one} {first}, rank {other} \
         {second}; the gathers stay in the declared order, and may need more memory than planned"
    );
}

fn in_words(says: UnitUse, spec: &ModelSpec) -> String {
    match says {
        UnitUse::Needs(unit) => format!("needs unit {}", spec[unit].name),
        UnitUse::Ends => "has ended its forward".to_owned(),
        UnitUse::Follows => "has no forward".to_owned(),
    }
}

/// Decodes the records of all ranks, and concludes from them: see [`NextUnit::of`].
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn decide(
    gathered: &[u64],
    declared: &[UnitId],
    own: Rank,
) -> Result<(usize, NextUnit), Error> {
    check_magic(gathered, (WORDS, MAGIC), ("the protocol of the unit records", own))?;
    let records: Vec<_> = gathered.chunks_exact(WORDS).map(decode).collect();
    Ok(NextUnit::of(&records, declared))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_were_written_and_another_protocol_is_named() {
        let records =
            [(UnitUse::Needs(UnitId::new(7)), 3), (UnitUse::Ends, 3), (UnitUse::Follows, 0)];
        let mut words = records.map(|(says, place)| encode(says, place)).concat();
        let read: Vec<_> = words.chunks_exact(WORDS).map(decode).collect();
        assert_eq!(read, records);
        words[3] += 1;
        let message = decide(&words, &[], Rank::new(0)).unwrap_err().to_string();
        let expected = "the protocol of the unit records differs between ranks: rank 1 has 0x";
        assert!(message.starts_with(expected), "{message}");
    }
}
