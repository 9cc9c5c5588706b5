//! What is not finite, as kernels note it in passing.

use std::time::Duration;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::launch::Note;
use super::stream::Stream;

/// Bits of a note that are an index; the round is above them.
const INDEX_BITS: u32 = 44;

/// The latest round that is told from those after it.
const LAST_ROUND: u64 = (1 << (u64::BITS - INDEX_BITS)) - 2;

/// Where kernels note the first element that is not finite: of what a member contributes, and of the sums that it gets.
///
/// What comes in an earlier round is first, whatever its index: of a step that sums several times into one target.
#[derive(Debug)]
pub struct Noted {
    /// Two u64.
    pub(super) words: DeviceBuffer,
}

/// Where a kernel notes, and in which round.
#[derive(Debug)]
pub struct Notes<'a> {
    /// Where.
    pub noted: &'a mut Noted,
    /// The round, from 0.
    pub round: usize,
}

/// An element that is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FirstFound {
    /// In which round it was noted; later ones than 2^20 - 2 are that one.
    pub round: usize,
    /// Its index in the buffer that was written.
    pub index: usize,
}

/// What was noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WhatWasNoted {
    /// By [`Stream::pack`].
    pub contribution: Option<FirstFound>,
    /// By [`Stream::sum`].
    pub sum: Option<FirstFound>,
}

/// What a kernel looks at.
#[derive(Clone, Copy, Debug)]
pub(super) enum Of {
    Contribution,
    Sum,
}

impl Noted {
    /// A place in which nothing is noted yet.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Driver`].
    pub fn new(stream: &Stream) -> Result<Self, CudaError> {
        let mut noted = Self { words: words(stream, 2, "what is not finite")? };
        noted.clear(stream)?;
        Ok(noted)
    }

    /// Forgets what was noted.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn clear(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.words.fill(stream, 0xff)
    }
}

impl Stream {
    /// What was noted in each of these. Waits for it.
    ///
    /// # Errors
    /// [`CudaError::Late`] after `patience`; [`CudaError::OutOfMemory`]; [`CudaError::Driver`].
    pub fn read_noted(
        &self,
        noted: &[&Noted],
        patience: Duration,
    ) -> Result<Vec<WhatWasNoted>, CudaError> {
        // Side by side, so that it is waited for once.
        let mut all = words(self, 2 * noted.len(), "what is not finite")?;
        for (index, noted) in noted.iter().enumerate() {
            all.copy(self, 4 * index..4 * (index + 1), (&noted.words, 0..4))?;
        }
        let words = read_words(self, &all, patience)?;
        let both = |pair: &[u64; 2]| WhatWasNoted {
            contribution: first_found(pair[0]),
            sum: first_found(pair[1]),
        };
        Ok(words.as_chunks().0.iter().map(both).collect())
    }
}

/// Room for `count` numbers of 8 bytes.
pub(super) fn words(stream: &Stream, count: usize, what: &str) -> Result<DeviceBuffer, CudaError> {
    DeviceBuffer::new(stream.device(), DType::F32, 2 * count, what)
}

/// Reads them back.
pub(super) fn read_words(
    stream: &Stream,
    words: &DeviceBuffer,
    patience: Duration,
) -> Result<Vec<u64>, CudaError> {
    let halves = words.read_back(stream, patience)?.values().to_f32();
    let word = |[low, high]: &[f32; 2]| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
    Ok(halves.as_chunks().0.iter().map(word).collect())
}

/// The argument of a kernel that notes, or does not.
pub(super) fn argument(notes: Option<&Notes<'_>>, of: Of) -> Note {
    let Some(Notes { noted, round }) = notes else { return Note { least: 0, base: 0 } };
    let round = LAST_ROUND.min(*round as u64);
    Note { least: noted.words.address(2 * of as usize), base: round << INDEX_BITS }
}

fn first_found(word: u64) -> Option<FirstFound> {
    let number = |part: u64| usize::try_from(part).unwrap_or(usize::MAX);
    let (round, index) = (number(word >> INDEX_BITS), number(word & ((1 << INDEX_BITS) - 1)));
    (word != u64::MAX).then_some(FirstFound { round, index })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_in_an_earlier_round_is_less() {
        let word = |round: u64, index: u64| (LAST_ROUND.min(round) << INDEX_BITS) + index;
        assert!(word(0, 1 << 40) < word(1, 0));
        assert!(word(LAST_ROUND, (1 << INDEX_BITS) - 1) < u64::MAX);
        assert_eq!(first_found(word(3, 17)), Some(FirstFound { round: 3, index: 17 }));
        assert_eq!(first_found(u64::MAX), None);
    }
}
