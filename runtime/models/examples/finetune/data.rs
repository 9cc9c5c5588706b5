//! The data of a run: batches in a file, or a text.

use candle_core::{Device, Result, Tensor};
use hsdp::Rank;
use hsdp_train::Digest;

use super::batches::Batches;
use super::text::Text;

/// The data of a run.
#[derive(Debug)]
pub(crate) enum Data {
    Batches(Batches),
    Text(Text),
}

/// One microbatch of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) step: usize,
    pub(crate) microbatch: usize,
    pub(crate) rank: Rank,
}

/// Sequences: the tokens, and for each the one that follows, or -100 where that does not count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequences {
    pub(crate) tokens: Vec<u32>,
    pub(crate) labels: Vec<i64>,
    pub(crate) length: usize,
}

impl Sequences {
    /// The number of sequences.
    pub(crate) fn count(&self) -> usize {
        self.tokens.len() / self.length.max(1)
    }

    /// Some of the sequences, one after the other.
    pub(crate) fn part(&self, from: usize, to: usize) -> Self {
        let range = from * self.length..to * self.length;
        let (tokens, labels) = (self.tokens[range.clone()].to_vec(), self.labels[range].to_vec());
        Self { tokens, labels, length: self.length }
    }

    /// Tokens (u32) and labels (i64) as tensors, `[sequences, length]`.
    pub(crate) fn tensors(&self, device: &Device) -> Result<[Tensor; 2]> {
        let shape = (self.count(), self.length);
        let tokens = Tensor::from_slice(&self.tokens, shape, device)?;
        Ok([tokens, Tensor::from_slice(&self.labels, shape, device)?])
    }
}

impl Data {
    /// The sequences of a microbatch.
    pub(crate) fn microbatch(&self, place: Place) -> Sequences {
        match self {
            Self::Batches(batches) => batches.microbatch(place),
            Self::Text(text) => text.microbatch(place),
        }
    }

    /// The sequences that are held out, if there are any.
    pub(crate) fn held_out(&self) -> &Sequences {
        match self {
            Self::Batches(batches) => batches.held_out(),
            Self::Text(text) => text.held_out(),
        }
    }

    /// The tokens of a microbatch.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Self::Batches(batches) => batches.tokens(),
            Self::Text(text) => text.tokens(),
        }
    }

    pub(crate) fn digest(&self) -> Digest {
        match self {
            Self::Batches(batches) => batches.digest(),
            Self::Text(text) => text.digest(),
        }
    }

    /// An item of the loss, in words.
    pub(crate) fn item(&self) -> &'static str {
        match self {
            Self::Batches(_) => "token",
            Self::Text(text) => text.item(),
        }
    }
}
