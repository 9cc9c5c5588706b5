//! The words of a statement about buffers, and the conclusion of all ranks from them: a pure
//! function, so that all ranks come to the same one.
//!
//! A rank's record has the number of microbatches that its program has run, the number of them in
//! which it has written each buffer, a digest of each buffer that ranks write equally, and the
//! values of those that are averaged. The first rank with the most microbatches is the source.
//!
//! A rank that has run as many microbatches as the source has written each buffer as often, and
//! with the same digest if the rule is [`Equal`](BufferRule::Equal). A rank with fewer microbatches
//! had no data for some: it may have written less, and then takes the values of the source.
//! Everything else ends the step with an error. An averaged buffer becomes the mean over the ranks
//! that have written it.

use std::collections::BTreeSet;

use hsdp_sharding::{BufferRule, ModelSpec, Param, Rank};
use xxhash_rust::xxh3::xxh3_64;

use crate::state::buffers::ModelBuffers;

/// The words of one rank about buffers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BufferWords {
    /// The number of microbatches that its program has run in the step.
    pub(crate) microbatches: u64,
    /// The number of these that have written each buffer, in declared order.
    pub(crate) writes: Vec<u64>,
    /// A digest of each buffer that ranks write equally, in declared order.
    pub(crate) digests: Vec<u64>,
    /// The values of the buffers that are averaged, one after the other.
    pub(crate) averaged: Vec<f32>,
}

/// The conclusion of all ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BufferAgreement {
    /// The rank whose values count; `None` if no rank has written a buffer.
    pub(crate) source: Option<Rank>,
    /// The ranks that lack values of the source.
    pub(crate) lacking: BTreeSet<Rank>,
    /// The averaged buffers, one after the other.
    pub(crate) averaged: Vec<f32>,
}

/// A buffer that is not equal on two ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BufferDifference {
    /// The place of the buffer among all buffers of the model.
    pub(crate) buffer: usize,
    /// The first rank that differs, and the source.
    pub(crate) ranks: [Rank; 2],
    /// The difference.
    pub(crate) found: DifferenceFound,
}

/// The numbers in which two ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DifferenceFound {
    /// Digests of a buffer that both have written.
    Written([u64; 2]),
    /// Digests of a buffer that neither has written: it was not equal before the step.
    Unwritten([u64; 2]),
    /// Numbers of microbatches that have written it.
    Writes([u64; 2]),
}

impl BufferWords {
    /// Returns the words of this rank.
    pub(crate) fn of(buffers: &ModelBuffers) -> Self {
        let digest = |values: &[f32]| xxh3_64(bytemuck::cast_slice(values));
        Self {
            microbatches: buffers.microbatches(),
            writes: buffers.writes().collect(),
            digests: buffers.of_rule(BufferRule::Equal).map(digest).collect(),
            averaged: buffers.of_rule(BufferRule::Averaged).flatten().copied().collect(),
        }
    }

    /// Returns the words: none if the model has no buffer.
    pub(crate) fn encode(&self) -> impl Iterator<Item = u64> {
        let microbatches = (!self.writes.is_empty()).then_some(self.microbatches);
        let numbers = self.writes.iter().chain(&self.digests).copied();
        microbatches.into_iter().chain(numbers).chain(self.averaged.chunks(2).map(pair))
    }

    /// Decodes the words of a rank.
    ///
    /// # Panics
    /// If they are not those of a rank with this model.
    pub(crate) fn decode(words: &[u64], spec: &ModelSpec) -> Self {
        let [microbatches, words @ ..] = words else { return Self::default() };
        let (writes, words) = words.split_at(spec.buffers().count());
        let (digests, pairs) = words.split_at(spec.buffers_of(BufferRule::Equal).count());
        let mut averaged: Vec<f32> = pairs.iter().copied().flat_map(unpair).collect();
        averaged.truncate(spec.buffers_of(BufferRule::Averaged).map(Param::numel).sum());
        Self {
            microbatches: *microbatches,
            writes: writes.to_vec(),
            digests: digests.to_vec(),
            averaged,
        }
    }
}

impl BufferAgreement {
    /// Concludes from the words of all ranks, in rank order.
    ///
    /// # Errors
    /// The first buffer that is not equal on a rank and the source.
    pub(crate) fn of(spec: &ModelSpec, heard: &[&BufferWords]) -> Result<Self, BufferDifference> {
        let most = heard.iter().map(|words| words.microbatches).max().unwrap_or(0);
        let source = heard.iter().position(|words| words.microbatches == most).unwrap_or(0);
        let mut agreed = Self::default();
        let mut averaged = 0;
        let mut digest = 0;
        for (buffer, (_, declared)) in spec.buffers().enumerate() {
            let is_averaged = declared.buffer == Some(BufferRule::Averaged);
            for (rank, words) in heard.iter().enumerate() {
                let counts = [words, heard[source]].map(|words| words.writes[buffer]);
                let ranks = [rank, source].map(Rank::new);
                let differs = |found| Err(BufferDifference { buffer, ranks, found });
                let may_lack = words.microbatches < most;
                if counts[0] != counts[1] && !(may_lack && counts[0] < counts[1]) {
                    return differs(DifferenceFound::Writes(counts));
                }
                if is_averaged {
                    continue;
                }
                let digests = [words, heard[source]].map(|words| words.digests[digest]);
                match digests[0] == digests[1] {
                    true => {}
                    false if counts[0] < counts[1] => drop(agreed.lacking.insert(ranks[0])),
                    false if counts[0] == 0 => return differs(DifferenceFound::Unwritten(digests)),
                    false => return differs(DifferenceFound::Written(digests)),
                }
            }
            if is_averaged {
                let end = averaged + declared.numel();
                agreed.average(heard, source, buffer, averaged..end);
                averaged = end;
            } else {
                digest += 1;
            }
        }
        let is_written = heard.iter().any(|words| words.writes.iter().any(|writes| *writes > 0));
        Ok(if is_written {
            Self { source: Some(Rank::new(source)), ..agreed }
        } else {
            Self::default()
        })
    }

    /// Appends the mean of a buffer over the ranks that have written it, or the value of the source
    /// if none has.
    fn average(
        &mut self,
        heard: &[&BufferWords],
        source: usize,
        buffer: usize,
        range: std::ops::Range<usize>,
    ) {
        let written = || heard.iter().filter(|words| words.writes[buffer] > 0);
        if written().next().is_none() {
            return self.averaged.extend(&heard[source].averaged[range]);
        }
        self.averaged.extend(range.map(|at| mean(written().map(move |words| words.averaged[at]))));
    }
}

/// Returns the mean of values, added up in f64. Values that are all the same keep their bits.
#[expect(clippy::cast_possible_truncation, reason = "the one rounding of a mean of f32")]
fn mean(values: impl Iterator<Item = f32> + Clone) -> f32 {
    let first = values.clone().next().unwrap_or(0.0);
    if values.clone().all(|value| value.to_bits() == first.to_bits()) {
        return first;
    }
    let add = |(sum, count): (f64, f64), value: f32| (sum + f64::from(value), count + 1.0);
    let (sum, count) = values.fold((0.0, 0.0), add);
    (sum / count) as f32
}

/// Returns one or two f32 in a word.
pub(crate) fn pair(values: &[f32]) -> u64 {
    let bits = |at: usize| values.get(at).map_or(0, |value| u64::from(value.to_bits()));
    bits(0) | bits(1) << 32
}

/// Returns the two f32 in a word.
#[expect(clippy::cast_possible_truncation, reason = "each half of a word")]
pub(crate) fn unpair(word: u64) -> [f32; 2] {
    [word as u32, (word >> 32) as u32].map(f32::from_bits)
}

#[cfg(test)]
mod tests {
    use hsdp_sharding::Unit;
    use hsdp_sharding::step::Exchange;

    use super::*;

    /// Two buffers that are equal, with an averaged one between them.
    fn spec() -> ModelSpec {
        ModelSpec::new().unit(
            Unit::new("a")
                .param(Param::new("mean", [4]).buffer())
                .param(Param::new("own", [3]).averaged_buffer())
                .param(Param::new("var", [4]).buffer()),
        )
    }

    fn words(microbatches: u64, writes: [u64; 3], digests: [u64; 2], own: f32) -> BufferWords {
        let averaged = vec![own, -0.0, f32::MIN_POSITIVE];
        BufferWords { microbatches, writes: writes.to_vec(), digests: digests.to_vec(), averaged }
    }

    fn agreed(heard: &[BufferWords]) -> Result<BufferAgreement, BufferDifference> {
        BufferAgreement::of(&spec(), &heard.iter().collect::<Vec<_>>())
    }

    fn difference(
        buffer: usize,
        ranks: [usize; 2],
        found: DifferenceFound,
    ) -> Result<BufferAgreement, BufferDifference> {
        Err(BufferDifference { buffer, ranks: ranks.map(Rank::new), found })
    }

    #[test]
    fn words_survive_the_way() {
        let spec = spec();
        let own = words(3, [2, 1, 0], [7, u64::MAX], 1.5);
        let encoded: Vec<u64> = own.encode().collect();
        assert_eq!(encoded.len(), Exchange::buffer_words(&spec));
        assert_eq!(BufferWords::decode(&encoded, &spec), own);
        let none = BufferWords::default();
        assert_eq!(none.encode().count(), Exchange::buffer_words(&ModelSpec::new()));
        assert_eq!(BufferWords::decode(&[], &ModelSpec::new()), none);
    }

    #[test]
    fn ranks_without_data_take_the_values_of_the_others() {
        let heard = [
            words(1, [1, 1, 1], [5, 5], 3.0),
            words(2, [2, 2, 2], [6, 6], 1.0),
            words(0, [0, 0, 0], [5, 6], 100.0),
        ];
        let agreed = agreed(&heard).expect("rank 1 is the source");
        assert_eq!(agreed.source, Some(Rank::new(1)));
        assert_eq!(agreed.lacking, [0, 2].map(Rank::new).into());
        let kept = [-0.0_f32, f32::MIN_POSITIVE].map(f32::to_bits);
        let averaged: Vec<u32> = agreed.averaged.iter().map(|it| it.to_bits()).collect();
        assert_eq!(averaged, [&[2.0_f32.to_bits()][..], &kept].concat());
    }

    #[test]
    fn a_rank_with_as_much_data_has_written_as_often() {
        let heard = [words(2, [2, 2, 2], [1, 1], 0.0), words(2, [2, 2, 1], [1, 1], 0.0)];
        assert_eq!(agreed(&heard), difference(2, [1, 0], DifferenceFound::Writes([1, 2])));
        // Also of an averaged buffer, and with more writes for less data.
        let heard = [words(2, [2, 1, 2], [1, 1], 0.0), words(2, [2, 2, 2], [1, 1], 0.0)];
        assert_eq!(agreed(&heard), difference(1, [1, 0], DifferenceFound::Writes([2, 1])));
        let heard = [words(2, [1, 1, 1], [1, 1], 0.0), words(1, [2, 1, 1], [1, 1], 0.0)];
        assert_eq!(agreed(&heard), difference(0, [1, 0], DifferenceFound::Writes([2, 1])));
    }

    #[test]
    fn the_first_buffer_that_differs_is_named() {
        let heard = [
            words(0, [0, 0, 0], [1, 1], 0.0),
            words(1, [1, 1, 1], [2, 3], 0.0),
            words(1, [1, 1, 1], [2, 4], 0.0),
        ];
        assert_eq!(agreed(&heard), difference(2, [2, 1], DifferenceFound::Written([4, 3])));
        let heard = [words(1, [0, 1, 1], [1, 1], 0.0), words(0, [0, 0, 0], [2, 1], 0.0)];
        assert_eq!(agreed(&heard), difference(0, [1, 0], DifferenceFound::Unwritten([2, 1])));
    }

    #[test]
    fn an_average_is_over_the_ranks_that_have_written_that_buffer() {
        let heard = [words(2, [1, 2, 0], [1, 1], 4.0), words(1, [1, 0, 0], [1, 1], 100.0)];
        assert_eq!(agreed(&heard).expect("equal").averaged[0].to_bits(), 4.0_f32.to_bits());
        // No rank has written it: it stays.
        let heard = [words(1, [1, 0, 0], [1, 1], 4.0), words(1, [1, 0, 0], [1, 1], 4.0)];
        assert_eq!(agreed(&heard).expect("equal").averaged[0].to_bits(), 4.0_f32.to_bits());
    }

    #[test]
    fn a_step_that_writes_nothing_changes_nothing() {
        let heard = [words(1, [0; 3], [1, 1], 3.0), words(1, [0; 3], [1, 1], 3.0)];
        assert_eq!(agreed(&heard), Ok(BufferAgreement::default()));
    }

    #[test]
    fn a_mean_of_numbers_that_are_none_is_none() {
        assert!(mean([1.0, f32::NAN].into_iter()).is_nan());
        assert_eq!(mean([1.0, 2.0, 6.0].into_iter()), 3.0);
    }
}
