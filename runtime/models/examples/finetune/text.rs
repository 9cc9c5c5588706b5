//! A text: its tokens, which are characters or those of a tokenizer, and its sequences.

use std::collections::BTreeSet;

use hsdp_train::{Digest, file};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::data::{Place, Sequences};
use super::folder::ModelFolder;
use super::options::Options;
use super::shared::failure::Failure;
use super::shared::markdown::{MAX_TEXT, read_repository};

/// The part of the text that is held out is one of these.
const PARTS: usize = 10;

/// The most sequences that are held out.
const MOST_HELD_OUT: usize = 32;

/// A text as tokens.
#[derive(Debug)]
pub(crate) struct Text {
    training: Vec<u32>,
    held_out: Sequences,
    /// The number of different tokens.
    vocabulary: usize,
    item: &'static str,
    digest: Digest,
    batch: usize,
    context: usize,
    seed: u64,
}

impl Text {
    /// Reads the text that the options name. Its tokens are its characters.
    pub(crate) fn of_characters(options: &Options) -> Result<Self, Failure> {
        let text = read(options)?;
        let characters: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let token = |c| u32::try_from(characters.partition_point(|known| *known < c));
        let tokens: Result<Vec<u32>, _> = text.chars().map(token).collect();
        let tokens = (tokens.map_err(Failure::input)?, characters.len());
        Self::new(tokens, "character", (options, Digest::of(text.as_bytes())))
    }

    /// Reads the text that the options name. Its tokens are those of the model's tokenizer.
    pub(crate) fn of_tokenizer(
        options: &Options,
        folder: &mut ModelFolder,
    ) -> Result<Self, Failure> {
        let (mut tokenizer, bytes) = folder.tokenizer()?;
        let refuse = |error| {
            Failure::Input(format!("the tokenizer of {}: {error}", folder.path().display()))
        };
        // The text is one sequence, as long as it is.
        tokenizer.with_truncation(None).map_err(refuse)?.with_padding(None);
        let text = read(options)?;
        let encoding = tokenizer.encode_fast(&*text, false).map_err(refuse)?;
        let tokens = encoding.get_ids().to_vec();
        let vocabulary = folder.config().vocab_size;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(Failure::Input(format!(
                "the tokenizer of {} finds token {token} in the text: the model has {vocabulary}",
                folder.path().display()
            )));
        }
        let digest = Digest::of(&[text.as_bytes(), &bytes].concat());
        Self::new((tokens, vocabulary), "token", (options, digest))
    }

    fn new(
        (mut tokens, vocabulary): (Vec<u32>, usize),
        item: &'static str,
        (options, digest): (&Options, Digest),
    ) -> Result<Self, Failure> {
        let Options { batch, context, seed, .. } = *options;
        let (count, least) = (tokens.len(), PARTS * (context + 1));
        if count < least {
            return Err(Failure::Input(format!(
                "the text has {count} {item}s: a context of {context} needs at least {least}"
            )));
        }
        let last = tokens.split_off(count - count / PARTS);
        let starts = (0..last.len() - context).step_by(context).take(MOST_HELD_OUT);
        let held_out = windows(&last, starts, context);
        Ok(Self { training: tokens, held_out, vocabulary, item, digest, batch, context, seed })
    }

    pub(crate) fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Windows of the text, which depend on the seed and the place alone.
    pub(crate) fn microbatch(&self, Place { step, microbatch, rank }: Place) -> Sequences {
        let key: Vec<u8> =
            [step, microbatch, rank.index()].iter().flat_map(|n| n.to_le_bytes()).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(xxh3_64_with_seed(&key, self.seed));
        let last = self.training.len() - self.context - 1;
        let starts = (0..self.batch).map(|_| rng.random_range(0..=last));
        windows(&self.training, starts, self.context)
    }

    pub(crate) fn held_out(&self) -> &Sequences {
        &self.held_out
    }

    pub(crate) fn tokens(&self) -> usize {
        self.batch.saturating_mul(self.context)
    }

    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    pub(crate) fn item(&self) -> &'static str {
        self.item
    }
}

fn read(options: &Options) -> Result<String, Failure> {
    match &options.data {
        Some(path) => file::read_text(path, MAX_TEXT).map_err(Failure::input),
        None => read_repository(),
    }
}

/// The windows of `length` tokens that begin at `starts`, with the token after each.
fn windows(tokens: &[u32], starts: impl Iterator<Item = usize>, length: usize) -> Sequences {
    let mut sequences = Sequences { length, ..Sequences::default() };
    for start in starts {
        sequences.tokens.extend(&tokens[start..start + length]);
        sequences.labels.extend(tokens[start + 1..=start + length].iter().map(|it| i64::from(*it)));
    }
    sequences
}
