//! Elements that are not finite, which kernels note during their other work.

use std::time::Duration;

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::launch::Note;
use super::stream::Stream;

/// The number of bits of a note that hold the index. The bits above hold the round.
const INDEX_BITS: u32 = 44;

/// The last round that a note can hold. Later rounds are noted as this one.
const LAST_ROUND: u64 = (1 << (u64::BITS - INDEX_BITS)) - 2;

/// A place in device memory where kernels note the first element that is infinite or NaN: one note for the
/// contributions of a member, and one for its sums.
///
/// The first element is the one of the earliest round, and within a round the one with the least index. Rounds tell
/// apart several sums of one step into the same target, such as those of microbatches.
#[derive(Debug)]
pub struct Noted {
    /// Two u64, as four f32.
    pub(super) words: DeviceBuffer,
}

/// The place and the round of a kernel's note.
#[derive(Debug)]
pub struct Notes<'a> {
    /// The place.
    pub noted: &'a mut Noted,
    /// The round, from 0.
    pub round: usize,
}

/// The first element that is infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FirstFound {
    /// The round in which it was noted, from 0. Rounds above 2^20 - 2 are noted as 2^20 - 2.
    pub round: usize,
    /// Its index in the buffer that the kernel wrote.
    pub index: usize,
}

/// The notes that were read back; `None` if all elements were finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WhatWasNoted {
    /// The note of [`Stream::pack`], on this member's contribution.
    pub contribution: Option<FirstFound>,
    /// The note of [`Stream::sum`], on the target.
    pub sum: Option<FirstFound>,
}

/// The elements that a kernel checks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Of {
    Contribution,
    Sum,
}

impl Noted {
    /// Makes a place without notes, on the device of `stream`.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if the device has no memory left; [`CudaError::Driver`] if a call of the driver
    /// fails.
    pub fn new(stream: &Stream) -> Result<Self, CudaError> {
        let mut noted = Self { words: words(stream, 2, "notes of non-finite elements")? };
        noted.clear(stream)?;
        Ok(noted)
    }

    /// Deletes the notes.
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if `stream` is of another device; [`CudaError::Driver`] if a call of the driver fails.
    pub fn clear(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.words.fill(stream, 0xff)
    }
}

impl Stream {
    /// Copies the notes of each of these places to the host, in their order, and waits for the copy for at most
    /// `patience`.
    ///
    /// # Errors
    /// [`CudaError::Late`] if the copy is not done after `patience`; [`CudaError::Mismatch`] if a place is on another
    /// device; [`CudaError::OutOfMemory`] if the device has no memory left; [`CudaError::Driver`] if a call of the
    /// driver fails, or an operation before the copy has failed.
    pub fn read_noted(
        &self,
        noted: &[&Noted],
        patience: Duration,
    ) -> Result<Vec<WhatWasNoted>, CudaError> {
        // All notes go into one buffer, so that the host waits once.
        let mut all = words(self, 2 * noted.len(), "notes of non-finite elements")?;
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

/// A buffer for `count` numbers of 8 bytes.
pub(super) fn words(stream: &Stream, count: usize, what: &str) -> Result<DeviceBuffer, CudaError> {
    DeviceBuffer::new(stream.device(), DType::F32, 2 * count, what)
}

/// Copies such a buffer to the host.
pub(super) fn read_words(
    stream: &Stream,
    words: &DeviceBuffer,
    patience: Duration,
) -> Result<Vec<u64>, CudaError> {
    let halves = words.read_back(stream, patience)?.values().to_f32();
    let word = |[low, high]: &[f32; 2]| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
    Ok(halves.as_chunks().0.iter().map(word).collect())
}

/// The argument for the notes of a kernel; with `None` the kernel notes nothing.
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
