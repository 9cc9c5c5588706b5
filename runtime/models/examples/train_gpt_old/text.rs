//! The training text: its source, its characters as tokens, and its batches.

use std::collections::BTreeSet;

use candle_core::{Device, Result as CandleResult, Tensor};
use hsdp::Rank;
use hsdp_train::Digest;
use hsdp_train::file;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::options::Options;
use super::shared::failure::Failure;
use super::shared::markdown::{MAX_TEXT, read_repository};

/// A text as tokens, one a character.
#[derive(Debug)]
pub(crate) struct Corpus {
    tokens: Vec<u32>,
    /// The characters that occur, sorted: token `t` is `vocabulary[t]`.
    vocabulary: Vec<char>,
    digest: Digest,
    batch: usize,
    context: usize,
    seed: u64,
}

/// One microbatch of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) step: usize,
    pub(crate) microbatch: usize,
    pub(crate) rank: Rank,
}

/// The tokens that a rank reads, and for each the token that follows it: both u32, `[batch, context]`.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) inputs: Tensor,
    pub(crate) targets: Tensor,
}

impl Corpus {
    /// The digest of the text, and so of its vocabulary.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// Reads the text that the options name.
    pub(crate) fn read(options: &Options) -> Result<Self, Failure> {
        let text = match &options.data {
            Some(path) => file::read_text(path, MAX_TEXT).map_err(Failure::input)?,
            None => read_repository()?,
        };
        let vocabulary: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let token = |c| u32::try_from(vocabulary.partition_point(|known| *known < c));
        let tokens: Vec<u32> =
            text.chars().map(token).collect::<Result<_, _>>().map_err(Failure::input)?;
        if tokens.len() <= options.context {
            return Err(Failure::Input(format!(
                "the text has {} characters: a context of {} needs at least {}",
                tokens.len(),
                options.context,
                options.context + 1
            )));
        }
        let Options { batch, context, seed, .. } = *options;
        let digest = Digest::of(text.as_bytes());
        Ok(Self { tokens, vocabulary, digest, batch, context, seed })
    }

    /// The number of different characters.
    pub(crate) fn vocabulary(&self) -> usize {
        self.vocabulary.len()
    }

    /// The number of characters.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The microbatch of a place, on a device: windows of the text, which depend on the seed and the place alone.
    pub(crate) fn batch(&self, place: Place, device: &Device) -> CandleResult<Batch> {
        let Place { step, microbatch, rank } = place;
        let key: Vec<u8> =
            [step, microbatch, rank.index()].iter().flat_map(|n| n.to_le_bytes()).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(xxh3_64_with_seed(&key, self.seed));
        let last = self.tokens.len() - self.context - 1;
        let starts: Vec<usize> = (0..self.batch).map(|_| rng.random_range(0..=last)).collect();
        let windows = |shift: usize| {
            let window = |start: &usize| &self.tokens[start + shift..][..self.context];
            let tokens: Vec<u32> = starts.iter().flat_map(window).copied().collect();
            Tensor::from_vec(tokens, (self.batch, self.context), device)
        };
        Ok(Batch { inputs: windows(0)?, targets: windows(1)? })
    }

    /// The first line of the text that is not empty, as a prompt, cut to the length of the context.
    pub(crate) fn prompt(&self) -> Vec<u32> {
        let newline = self.vocabulary.iter().position(|c| *c == '\n');
        let is_newline = |token: &u32| newline == usize::try_from(*token).ok();
        let line =
            self.tokens.split(is_newline).find(|line| !line.is_empty()).unwrap_or(&self.tokens);
        line[..line.len().min(self.context)].to_vec()
    }

    /// The text of some tokens.
    pub(crate) fn text(&self, tokens: &[u32]) -> String {
        tokens
            .iter()
            .filter_map(|token| self.vocabulary.get(usize::try_from(*token).ok()?))
            .collect()
    }
}
