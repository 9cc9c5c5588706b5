//! The set of the model's parameters that got a gradient, by their numbers.

/// A set of parameter numbers, in 64-bit words that ranks exchange as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Presence {
    parameters: usize,
    words: Vec<u64>,
}

const WORD_BITS: usize = u64::BITS as usize;

impl Presence {
    /// The empty set, of a model of `parameters` parameters.
    pub(crate) fn none(parameters: usize) -> Self {
        Self { parameters, words: vec![0; parameters.div_ceil(WORD_BITS)] }
    }

    /// The set of these words.
    pub(crate) fn of(parameters: usize, words: &[u64]) -> Self {
        debug_assert_eq!(words.len(), parameters.div_ceil(WORD_BITS));
        Self { parameters, words: words.to_vec() }
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    pub(crate) fn insert(&mut self, parameter: usize) {
        self.words[parameter / WORD_BITS] |= 1 << (parameter % WORD_BITS);
    }

    pub(crate) fn contains(&self, parameter: usize) -> bool {
        self.words[parameter / WORD_BITS] >> (parameter % WORD_BITS) & 1 == 1
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word |= more;
        }
    }
}
