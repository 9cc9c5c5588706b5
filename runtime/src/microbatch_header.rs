//! The microbatch header: 16 bytes that ranks exchange before each microbatch of a step whose number of microbatches was
//! not given, and when they have no more. PROTOCOL.md, "Records".

use crate::uneven::{Input, Supply};

const WORDS: usize = 2;
const MAGIC: u64 = u64::from_be_bytes(*b"hsdp-mb1");

pub(crate) fn encode(input: Input) -> Vec<u64> {
    vec![MAGIC, u64::from(input == Input::Exhausted)]
}

/// What all ranks said.
pub(crate) fn decode(gathered: &[u64]) -> Supply {
    let input = |header: &[u64]| if header[1] == 0 { Input::Ready } else { Input::Exhausted };
    Supply::of(gathered.chunks_exact(WORDS).map(input))
}
