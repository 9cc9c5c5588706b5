//! Data to train on: a text, or sequences in a file, with a part that is held out.

mod batches;
mod tokens;

use std::ops::Range;
use std::path::PathBuf;

use candle_core::{Device, Result as CandleResult, Tensor};
use hsdp::ShardedModel;
use hsdp_candle::Pass;
use hsdp_train::file::FileError;
use hsdp_train::{Digest, Place};

use crate::decoder::Decoder;
use crate::text::{random_windows, windows};

pub use self::tokens::Tokens;

/// Number of equal parts of a text. The last one is held out.
const PARTS: usize = 10;

/// Maximum number of sequences of a text that are held out.
const MOST_HELD_OUT: usize = 32;

/// The reason why data cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The content of a file is wrong.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The problem, in words.
        problem: String,
    },
    /// A folder of transformers has no tokenizer.
    #[error("{} has no tokenizer.json, which a text needs", folder.display())]
    NoTokenizer {
        /// The folder.
        folder: PathBuf,
    },
    /// A tokenizer fails.
    #[error("the tokenizer of {}: {problem}", folder.display())]
    Tokenizer {
        /// The folder of the tokenizer.
        folder: PathBuf,
        /// The problem, in words.
        problem: String,
    },
    /// A tokenizer finds a token in a text that its model does not have.
    #[error(
        "the tokenizer of {} finds token {token} in the text: the model has {vocabulary}",
        folder.display()
    )]
    UnknownToken {
        /// The folder of both.
        folder: PathBuf,
        /// The token.
        token: u32,
        /// Number of tokens of the model.
        vocabulary: usize,
    },
    /// A sequence of a text would have no tokens.
    #[error("a context of 0 has no tokens: it must be at least 1")]
    EmptyContext,
    /// A text is too short.
    #[error("the text has {count} {item}s: a context of {context} needs at least {least}")]
    Short {
        /// Number of tokens in the text.
        count: usize,
        /// A token, in words.
        item: &'static str,
        /// Number of tokens in a sequence.
        context: usize,
        /// Number of tokens that the text needs.
        least: usize,
    },
}

/// Sequences of equal length: tokens, and for each the token that follows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSequences {
    /// Tokens of all sequences, one after the other.
    pub tokens: Vec<u32>,
    /// Next tokens, or [`IGNORED`](crate::nn::IGNORED) where one does not count.
    pub labels: Vec<i64>,
    /// Number of tokens in a sequence.
    pub length: usize,
}

impl TokenSequences {
    /// Returns the number of sequences.
    #[must_use]
    pub fn count(&self) -> usize {
        self.tokens.len() / self.length.max(1)
    }

    /// Returns some of the sequences.
    ///
    /// # Panics
    /// If there are fewer sequences.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        let range = range.start * self.length..range.end * self.length;
        let tokens = self.tokens[range.clone()].to_vec();
        let labels = self.labels[range].to_vec();
        Self { tokens, labels, length: self.length }
    }

    /// Returns the tokens (u32) and the labels (i64) as tensors, `[sequences, length]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn tensors(&self, device: &Device) -> CandleResult<[Tensor; 2]> {
        let shape = (self.count(), self.length);
        let tokens = Tensor::from_slice(&self.tokens, shape, device)?;
        Ok([tokens, Tensor::from_slice(&self.labels, shape, device)?])
    }

    fn of([tokens, next]: [Vec<u32>; 2], length: usize) -> Self {
        Self { tokens, labels: next.into_iter().map(i64::from).collect(), length }
    }
}

/// How a text is cut into sequences.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Number of sequences in a microbatch.
    pub batch: usize,
    /// Number of tokens in a sequence.
    pub context: usize,
    /// Seed of the choice of sequences.
    pub seed: u64,
}

/// Sequences for each microbatch, and sequences that are held out.
///
/// ```
/// use hsdp::Rank;
/// use hsdp_models::data::{Data, Tokens, Windows};
/// use hsdp_train::Place;
///
/// let text = Tokens::characters(&"she sells sea shells ".repeat(20));
/// let data = Data::of_text(text, Windows { batch: 2, context: 8, seed: 1 })?;
/// let sequences = data.microbatch(Place { step: 0, microbatch: 0, rank: Rank::new(0) });
/// assert_eq!((sequences.count(), sequences.tokens.len()), (2, 16));
/// assert_eq!(data.held_out().count(), 5); // in the last tenth of the text
/// # Ok::<(), hsdp_models::data::DataError>(())
/// ```
#[derive(Debug)]
pub struct Data {
    training: TrainingData,
    held_out: TokenSequences,
    /// Number of sequences in a microbatch.
    batch: usize,
    /// Number of tokens in a sequence of a microbatch.
    length: usize,
    item: &'static str,
    digest: Digest,
    warnings: Vec<String>,
}

#[derive(Debug)]
enum TrainingData {
    /// Sequences by step.
    Batches { sequences: TokenSequences, of_step: usize, microbatches: usize },
    /// A text.
    Text { tokens: Vec<u32>, seed: u64 },
}

impl Data {
    /// Takes the sequences of a text from random places. Holds out the last tenth of the text, with
    /// at most 32 sequences, one after the other.
    ///
    /// # Errors
    /// [`DataError::EmptyContext`] if the context is 0, and [`DataError::Short`] if the last tenth
    /// has no sequence.
    pub fn of_text(text: Tokens, cut: Windows) -> Result<Self, DataError> {
        let Tokens { mut ids, item, digest, warnings, .. } = text;
        let Windows { batch, context, seed } = cut;
        if context == 0 {
            return Err(DataError::EmptyContext);
        }
        let count = ids.len();
        let least = context.saturating_add(1).saturating_mul(PARTS);
        if count < least {
            return Err(DataError::Short { count, item, context, least });
        }
        let last = ids.split_off(count - count / PARTS);
        let starts = (0..last.len() - context).step_by(context).take(MOST_HELD_OUT);
        let held_out = TokenSequences::of(windows(&last, starts, context), context);
        let training = TrainingData::Text { tokens: ids, seed };
        Ok(Self { training, held_out, batch, length: context, item, digest, warnings })
    }

    /// Returns the sequences of a microbatch. Windows of a text depend on the seed and the place
    /// alone. The sequences of a step in a file are dealt in blocks: ranks have consecutive blocks,
    /// and so have the microbatches of a rank.
    ///
    /// # Panics
    /// If the file has no such step, or the place is beyond the ranks or microbatches for which the
    /// file was read.
    #[must_use]
    pub fn microbatch(&self, place: Place) -> TokenSequences {
        let Place { step, microbatch, rank } = place;
        match &self.training {
            TrainingData::Text { tokens, seed } => {
                let key = [step, microbatch as u64, rank.index() as u64];
                let windows = random_windows(tokens, self.batch, self.length, *seed, key);
                TokenSequences::of(windows, self.length)
            }
            TrainingData::Batches { sequences, of_step, microbatches } => {
                let step = usize::try_from(step).expect("the file has no such step");
                let ranks = of_step / (microbatches * self.batch);
                assert!(
                    rank.index() < ranks && microbatch < *microbatches,
                    "rank {rank} has no microbatch {microbatch} in step {step}: {ranks} ranks have \
                     {microbatches} microbatches each"
                );
                let block = rank.index() * microbatches + microbatch;
                let from = step * of_step + block * self.batch;
                sequences.part(from..from + self.batch)
            }
        }
    }

    /// Returns the sequences that are held out; none if a file has none.
    #[must_use]
    pub fn held_out(&self) -> &TokenSequences {
        &self.held_out
    }

    /// Computes the mean loss of the held-out sequences, a microbatch at a time. The ranks have
    /// consecutive parts of them. **Collective** over the world.
    ///
    /// # Errors
    /// As [`Decoder::loss`], [`ShardedModel::evaluation`] and [`hsdp::Evaluation::mean`]: no mean
    /// without a label that counts.
    pub fn held_out_loss(
        &self,
        decoder: &Decoder,
        model: &mut ShardedModel,
        device: &Device,
    ) -> Result<f64, hsdp_candle::Error> {
        let all = &self.held_out;
        let rank = model.rank().index();
        let ranks = model.world().size();
        let own = all.count() * rank / ranks..all.count() * (rank + 1) / ranks;
        let batch = (self.tokens() / all.length.max(1)).max(1);
        let mut sum = 0.0;
        let mut items = 0;
        let mut evaluation = model.evaluation()?;
        for from in own.clone().step_by(batch) {
            let [tokens, labels] = all.part(from..own.end.min(from + batch)).tensors(device)?;
            let pass = Pass::on(evaluation.batch()?, device)?;
            let loss = decoder.loss(&pass, &tokens, &labels)?;
            pass.finish()?;
            sum += f64::from(loss.sum.to_scalar::<f32>()?);
            items += loss.count;
        }
        Ok(evaluation.mean(sum, items)?)
    }

    /// Returns the number of steps for which there are sequences; `None` for a text, which has
    /// sequences for any number.
    #[must_use]
    pub fn steps(&self) -> Option<usize> {
        match &self.training {
            TrainingData::Text { .. } => None,
            TrainingData::Batches { sequences, of_step, .. } => Some(sequences.count() / of_step),
        }
    }

    /// Returns the number of tokens of a microbatch.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.batch.saturating_mul(self.length)
    }

    /// Returns the [warnings](Tokens::warnings) of the text's tokenizer.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the digest of the input.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the kind of the tokens, in words: `token` or `character`.
    #[must_use]
    pub fn item(&self) -> &'static str {
        self.item
    }
}
