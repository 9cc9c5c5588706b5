//! The exchanges on the control channel: a few words from each rank, in buffers that are reused for
//! the next exchange; and failures of work between steps.

use std::mem;
use std::panic::Location;

use hsdp_comm::{
    CallError, Channel, Error as CommError, Group, Lent, Mistake, Op, Reduction, StepFailure, Tag,
    World,
};
use hsdp_kernels::Element;
use hsdp_sharding::Rank;
use parking_lot::Mutex;

use crate::error::Error;

/// The control channel of one rank.
#[derive(Debug)]
pub(crate) struct Control {
    world: World,
    group: Group,
    said: Mutex<Vec<u64>>,
    heard: Mutex<Vec<u64>>,
}

impl Control {
    pub(crate) fn new(world: &World) -> Self {
        let group = world.world_group(Channel::Control);
        Self { world: world.clone(), group, said: Mutex::default(), heard: Mutex::default() }
    }

    /// Sends `words`, whose number is that of every rank, and calls `hear` with the words of all
    /// ranks, in rank order. A failure notifies the other ranks: the exchange is between steps.
    /// Collective over the world.
    ///
    /// # Errors
    /// Errors of an all-gather.
    pub(crate) fn exchange<R>(
        &self,
        tag: Tag,
        words: impl IntoIterator<Item = u64>,
        hear: impl FnOnce(&[u64]) -> R,
    ) -> Result<R, Error> {
        between_steps(&self.world, tag.step, || self.exchange_in_step(tag, words, hear))
    }

    /// As [`exchange`](Self::exchange), in a step: the step notifies the other ranks of a failure
    /// when it is dropped.
    ///
    /// # Errors
    /// Errors of an all-gather.
    pub(crate) fn exchange_in_step<R>(
        &self,
        tag: Tag,
        words: impl IntoIterator<Item = u64>,
        hear: impl FnOnce(&[u64]) -> R,
    ) -> Result<R, Error> {
        let [mut source, mut target] =
            [&self.said, &self.heard].map(|buffer| mem::take(&mut *buffer.lock()));
        source.clear();
        source.extend(words);
        target.resize(source.len() * self.group.size(), 0);
        let lent = self.group.all_gather_into(tag, Lent { source, target })?.wait()?;
        let heard = hear(&lent.target);
        *self.said.lock() = lent.source;
        *self.heard.lock() = lent.target;
        Ok(heard)
    }

    /// Reduces values of all ranks, as many on each, in rank order. All ranks get the same bits.
    /// Collective over the world.
    ///
    /// # Errors
    /// Errors of an all-reduce.
    pub(crate) fn all_reduce<T: Element>(
        &self,
        tag: Tag,
        by: Reduction,
        own: Vec<T>,
    ) -> Result<Vec<T>, Error> {
        Ok(self.group.all_reduce(tag, by, own)?.wait()?)
    }

    /// Returns the words of `rank`, in a step. The words of other ranks, as many, are not read.
    /// Collective over the world.
    ///
    /// # Errors
    /// Errors of a broadcast.
    pub(crate) fn words_of_in_step(
        &self,
        tag: Tag,
        rank: Rank,
        mine: Vec<u64>,
    ) -> Result<Vec<u64>, Error> {
        Ok(self.group.broadcast(tag, rank.index(), mine)?.wait()?)
    }

    /// Returns the text of `rank`; the texts of other ranks are ignored. A failure notifies the
    /// other ranks, as in [`exchange`](Self::exchange). Collective over the world.
    ///
    /// # Errors
    /// Errors of an all-gather and a broadcast.
    pub(crate) fn text_of(&self, tag: Tag, rank: Rank, mine: &str) -> Result<String, Error> {
        let mine = mine.as_bytes();
        let most = |lengths: &[u64]| lengths.iter().copied().max().unwrap_or(0);
        let longest = self.exchange(tag, [mine.len() as u64], most)?;
        let send = || {
            let words = padded(mine, longest).ok_or_else(|| CallError::OutOfMemory {
                op: Op::Broadcast,
                rank: self.world.rank(),
                step: tag.step,
                bytes: usize::try_from(longest).unwrap_or(usize::MAX),
                what: format!("a text of rank {rank}"),
            });
            let words = words.map_err(CommError::from)?;
            Ok(self.group.broadcast(tag, rank.index(), words)?.wait()?)
        };
        between_steps(&self.world, tag.step, send).map(|words| text_of(&words))
    }
}

/// Runs a part of the work of all ranks between steps. A rank that fails in it has no step to drop:
/// the other ranks get its error here, unless they have one already, and this rank leaves the
/// epoch. Where this rank has left an epoch by the same mistake of a rank that was ahead, the
/// others get no error. Never waits for another rank. PROTOCOL.md, "Failures between steps".
#[track_caller]
pub(crate) fn between_steps<T>(
    world: &World,
    step: u64,
    part: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    let epoch = world.epoch();
    let place = Location::caller();
    part().inspect_err(|error| {
        let failure = StepFailure { step, reason: error.to_string() };
        world.announce_mistake(epoch, failure, mistake(error, step, place));
        world.next_epoch();
    })
}

/// Returns the identity of the mistake that an error of `step` reports: of its kind, of the
/// operation that was called, and of the place in this crate that ran it. It does not depend on the
/// rank, nor on the program's values.
pub(crate) fn mistake(error: &Error, step: u64, place: &Location<'_>) -> Mistake {
    match error {
        Error::Comm(error) => Mistake::of(&(mem::discriminant(error), step, place)),
        Error::Data(kind) => {
            Mistake::of(&(mem::discriminant(error), mem::discriminant(kind), step, place))
        }
        Error::Gradients(kind) => {
            Mistake::of(&(mem::discriminant(error), mem::discriminant(kind), step, place))
        }
        _ => Mistake::of(&(mem::discriminant(error), error.operation(), step, place)),
    }
}

/// Returns a text as words, with zeros behind it that make it as long as the `longest` text; `None`
/// if there is no memory for it.
fn padded(text: &[u8], longest: u64) -> Option<Vec<u64>> {
    let words = usize::try_from(longest).ok()?.div_ceil(size_of::<u64>());
    let mut padded = Vec::new();
    padded.try_reserve_exact(words).ok()?;
    padded.extend(text.chunks(size_of::<u64>()).map(word));
    padded.resize(words, 0);
    Some(padded)
}

/// Returns up to eight bytes as a word, the rest of them zeros.
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; size_of::<u64>()];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

fn text_of(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{DataError, GradientError};

    #[test]
    fn mistakes_of_different_kinds_at_one_place_differ() {
        let place = Location::caller();
        let unused = GradientError::UnusedParameters {
            step: 3,
            parameters: Vec::new(),
            causes: String::new(),
        };
        let mistakes = [
            Error::Data(DataError::EmptyEvaluation { step: 3 }),
            Error::Data(DataError::EmptyStep { step: 3, ranks: Vec::new() }),
            Error::Gradients(unused),
            Error::Options { what: "a value".to_owned() },
        ]
        .map(|error| mistake(&error, 3, place));
        for (at, mistake) in mistakes.iter().enumerate() {
            assert!(!mistakes[..at].contains(mistake), "{at}");
        }
    }

    #[test]
    fn a_length_that_no_memory_holds_is_no_text() {
        assert_eq!(padded(b"eight by", 9).as_deref(), Some(&[word(b"eight by"), 0][..]));
        assert_eq!([1 << 62, u64::MAX].map(|longest| padded(b"eight by", longest)), [None, None]);
    }

    #[test]
    fn text_survives_the_way_through_words() {
        for text in ["", "mesh 2x2", "eight by", "prefetch 1\nobjective Sum"] {
            let words: Vec<u64> = text.as_bytes().chunks(8).map(word).chain([0]).collect();
            assert_eq!(text_of(&words), text);
        }
    }
}
