//! Batches of made-up tokens. Their values do not matter for the time.

use candle_core::{Device, Error, Result, Tensor};

use crate::size::{BATCH, CONTEXT};

/// The number of different tokens, about as many as a text has different characters.
pub(crate) const VOCABULARY: usize = 96;

/// Tokens of a microbatch on a rank.
pub(crate) const TOKENS: u64 = (BATCH * CONTEXT) as u64;

/// The inputs and targets of a microbatch, both `[BATCH, CONTEXT]`.
pub(crate) fn batch(step: usize, microbatch: usize, rank: usize) -> Result<(Tensor, Tensor)> {
    let start = 31 * step + 7 * microbatch + rank;
    let tokens = |shift: usize| {
        let token = |index| (start + index + shift) * 37 % VOCABULARY;
        let tokens = (0..BATCH * CONTEXT).map(|index| u32::try_from(token(index)));
        let tokens = tokens.collect::<std::result::Result<Vec<_>, _>>().map_err(Error::wrap)?;
        Tensor::from_vec(tokens, (BATCH, CONTEXT), &Device::Cpu)
    };
    Ok((tokens(0)?, tokens(1)?))
}
