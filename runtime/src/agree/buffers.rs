//! The words of a statement about buffers, and the conclusion of all ranks from them: a pure
//! function, so that all ranks come to the same one.
//!
//! A rank says in how many microbatches of the step it has written buffers, a digest of each buffer
//! that ranks write equally, and the values of those that are averaged. The ranks with the most
//! such microbatches are the sources. Where they differ, the step ends with an error. A rank with
//! fewer of them, which had no data for some, takes the values of the first source.

use hsdp_sharding::{BufferRule, ModelSpec, Param, Rank};
use xxhash_rust::xxh3::xxh3_64;

use crate::state::buffers::ModelBuffers;

/// The words of one rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BufferWords {
    /// The number of microbatches of the step in which this rank has written buffers.
    pub(crate) writes: u64,
    /// A digest of each buffer that ranks write equally.
    pub(crate) digests: Vec<u64>,
    /// The values of the buffers that are averaged, one after the other.
    pub(crate) averaged: Vec<f32>,
}

/// The conclusion of all ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BufferAgreement {
    /// The first rank with the most microbatches that have written; `None` if none has.
    pub(crate) source: Option<Rank>,
    /// The ranks that lack values of the source.
    pub(crate) lacking: Vec<Rank>,
    /// The means of the averaged buffers over the ranks that have written, one after the other.
    pub(crate) averaged: Vec<f32>,
}

/// A buffer that two ranks have written differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferDifference {
    /// The place of the buffer among those that ranks write equally.
    pub(crate) buffer: usize,
    /// The first rank that differs, and the rank with which it was compared, with their digests.
    pub(crate) ranks: [(Rank, u64); 2],
}

impl BufferWords {
    /// Returns the words of this rank.
    pub(crate) fn of(buffers: &ModelBuffers) -> Self {
        let digest = |values: &[f32]| xxh3_64(bytemuck::cast_slice(values));
        Self {
            writes: buffers.writes(),
            digests: buffers.of_rule(BufferRule::Equal).map(digest).collect(),
            averaged: buffers.of_rule(BufferRule::Averaged).flatten().copied().collect(),
        }
    }

    /// Returns the words: none if the model has no buffer.
    pub(crate) fn encode(&self) -> impl Iterator<Item = u64> {
        let has_buffers = !self.digests.is_empty() || !self.averaged.is_empty();
        let pairs = self.averaged.chunks(2).map(pair);
        let writes = has_buffers.then_some(self.writes);
        writes.into_iter().chain(self.digests.iter().copied()).chain(pairs)
    }

    /// Decodes the words of a rank.
    ///
    /// # Panics
    /// If they are not those of a rank with this model.
    pub(crate) fn decode(words: &[u64], spec: &ModelSpec) -> Self {
        let [writes, words @ ..] = words else {
            return Self { writes: 0, digests: Vec::new(), averaged: Vec::new() };
        };
        let is_averaged = |buffer: &&Param| buffer.buffer == Some(BufferRule::Averaged);
        let buffers = || spec.buffers().map(|(_, buffer)| buffer);
        let (digests, pairs) = words.split_at(buffers().filter(|it| !is_averaged(it)).count());
        let mut averaged: Vec<f32> = pairs.iter().copied().flat_map(unpair).collect();
        averaged.truncate(buffers().filter(is_averaged).map(Param::numel).sum());
        Self { writes: *writes, digests: digests.to_vec(), averaged }
    }
}

impl BufferAgreement {
    /// Concludes from the words of all ranks, in rank order.
    ///
    /// # Errors
    /// The first buffer that two sources have written differently.
    pub(crate) fn of<'a>(
        said: impl Iterator<Item = &'a BufferWords> + Clone,
    ) -> Result<Self, BufferDifference> {
        let most = said.clone().map(|words| words.writes).max().unwrap_or(0);
        let ranked = || (0..).map(Rank::new).zip(said.clone());
        let mut sources = ranked().filter(|(_, words)| words.writes == most);
        let Some((source, first)) = sources.next() else { return Ok(Self::default()) };
        for (rank, words) in sources {
            let mut digests = words.digests.iter().zip(&first.digests);
            if let Some(buffer) = digests.position(|(got, want)| got != want) {
                let ranks = [(rank, words.digests[buffer]), (source, first.digests[buffer])];
                return Err(BufferDifference { buffer, ranks });
            }
        }
        if most == 0 {
            return Ok(Self::default());
        }
        let lacks =
            |(rank, words): (Rank, &BufferWords)| (words.digests != first.digests).then_some(rank);
        let written = || said.clone().filter(|words| words.writes > 0);
        let of_all = |at: usize| written().map(move |words| words.averaged[at]);
        Ok(Self {
            source: Some(source),
            lacking: ranked().filter_map(lacks).collect(),
            averaged: (0..first.averaged.len()).map(|at| mean(of_all(at))).collect(),
        })
    }
}

/// Returns the mean of values, added up in f64.
#[expect(clippy::cast_possible_truncation, reason = "the one rounding of a mean of f32")]
fn mean(values: impl Iterator<Item = f32>) -> f32 {
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

    fn words(writes: u64, digests: &[u64], averaged: &[f32]) -> BufferWords {
        BufferWords { writes, digests: digests.to_vec(), averaged: averaged.to_vec() }
    }

    #[test]
    fn words_survive_the_way() {
        let spec = ModelSpec::new().unit(
            Unit::new("a")
                .param(Param::new("mean", [4]).buffer())
                .param(Param::new("own", [3]).averaged_buffer())
                .param(Param::new("var", [4]).buffer()),
        );
        let said = words(2, &[7, u64::MAX], &[1.5, -0.0, f32::MIN_POSITIVE]);
        let encoded: Vec<u64> = said.encode().collect();
        assert_eq!(encoded.len(), Exchange::buffer_words(&spec));
        assert_eq!(BufferWords::decode(&encoded, &spec), said);
        let none = BufferWords { writes: 0, digests: Vec::new(), averaged: Vec::new() };
        assert_eq!(none.encode().count(), Exchange::buffer_words(&ModelSpec::new()));
        assert_eq!(BufferWords::decode(&[], &ModelSpec::new()), none);
    }

    #[test]
    fn ranks_without_data_take_the_values_of_the_others() {
        let said = [words(1, &[5], &[3.0]), words(2, &[6], &[1.0]), words(0, &[5], &[100.0])];
        let agreed = BufferAgreement::of(said.iter()).expect("there is one source");
        let ranks = [0, 2].map(Rank::new).to_vec();
        let source = Some(Rank::new(1));
        assert_eq!(agreed, BufferAgreement { source, lacking: ranks, averaged: vec![2.0] });
    }

    #[test]
    fn sources_that_differ_are_named() {
        let said = [words(0, &[1, 1], &[]), words(1, &[2, 3], &[]), words(1, &[2, 4], &[])];
        let ranks = [(Rank::new(2), 4), (Rank::new(1), 3)];
        assert_eq!(BufferAgreement::of(said.iter()), Err(BufferDifference { buffer: 1, ranks }));
    }

    #[test]
    fn a_step_that_writes_nothing_changes_nothing() {
        let said = [words(0, &[1], &[3.0]), words(0, &[1], &[3.0])];
        assert_eq!(BufferAgreement::of(said.iter()), Ok(BufferAgreement::default()));
    }
}
