//! The microbatch header: 16 bytes that ranks exchange before each microbatch of a step whose number of microbatches was
//! not given, and once more when they have no more microbatches. PROTOCOL.md, "Records".

use hsdp_sharding::Rank;
use hsdp_sharding::step::Exchange;

use crate::error::Error;
use crate::options::uneven::{Input, Supply};

const WORDS: usize = Exchange::MICROBATCH;
const MAGIC: u64 = u64::from_be_bytes(*b"hsdp-mb1");

pub(crate) fn encode(input: Input) -> [u64; WORDS] {
    [MAGIC, u64::from(input == Input::Exhausted)]
}

/// Decodes the headers of all ranks.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn decode(gathered: &[u64], own: Rank) -> Result<Supply, Error> {
    check_magic(gathered, (WORDS, MAGIC), ("the protocol of the microbatch header", own))?;
    let input = |header: &[u64]| if header[1] == 0 { Input::Ready } else { Input::Exhausted };
    Ok(Supply::of(gathered.chunks_exact(WORDS).map(input)))
}

/// Compares the first words of the records of all ranks.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn check_magic(
    gathered: &[u64],
    (words, magic): (usize, u64),
    (what, own): (&'static str, Rank),
) -> Result<(), Error> {
    let mut firsts = gathered.iter().step_by(words);
    let Some(rank) = firsts.position(|first| *first != magic) else { return Ok(()) };
    let [got, want] = [gathered[rank * words], magic].map(|magic| format!("{magic:#018x}"));
    Err(Error::Disagreement { what: what.into(), rank: Rank::new(rank), got, other: own, want })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_comes_back_and_another_protocol_is_named() {
        let mut said = [Input::Ready, Input::Exhausted].map(encode).concat();
        let supply = decode(&said, Rank::new(0)).expect("one protocol");
        assert_eq!(
            (&*supply.ready, &*supply.exhausted),
            (&[Rank::new(0)][..], &[Rank::new(1)][..])
        );
        said[WORDS] += 1;
        let message = decode(&said, Rank::new(0)).unwrap_err().to_string();
        let expected = "the protocol of the microbatch header differs between ranks: rank 1 has 0x";
        assert!(message.starts_with(expected), "{message}");
    }
}
