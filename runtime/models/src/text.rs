//! Texts to train on: characters as tokens, and random windows of tokens.

use std::collections::BTreeSet;

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A text whose tokens are its characters.
///
/// ```
/// use hsdp_models::text::Characters;
///
/// let text = Characters::of("abba\ncab");
/// assert_eq!((text.vocabulary(), text.tokens()), (4, &[1, 2, 2, 1, 0, 3, 1, 2][..]));
/// assert_eq!(text.decode(&[3, 1, 2]), "cab");
/// ```
#[derive(Clone, Debug)]
pub struct Characters {
    tokens: Vec<u32>,
    /// Characters that occur, sorted: token `t` is `vocabulary[t]`.
    vocabulary: Vec<char>,
}

impl Characters {
    /// Reads a text.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let vocabulary: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        #[expect(clippy::cast_possible_truncation, reason = "there are 1,112,064 characters")]
        let token = |c| vocabulary.partition_point(|known| *known < c) as u32;
        Self { tokens: text.chars().map(token).collect(), vocabulary }
    }

    /// Returns the tokens of the text.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the number of different characters.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.vocabulary.len()
    }

    /// Returns a prompt: the first line that is not empty, cut to `most` characters.
    #[must_use]
    pub fn first_line(&self, most: usize) -> &[u32] {
        let newline = self.vocabulary.iter().position(|c| *c == '\n');
        let is_newline = |token: &u32| newline == usize::try_from(*token).ok();
        let mut lines = self.tokens.split(is_newline);
        let line = lines.find(|line| !line.is_empty()).unwrap_or(&self.tokens);
        &line[..line.len().min(most)]
    }

    /// Returns the text of some tokens. Tokens beyond the vocabulary are left out.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        let known = |token: &u32| self.vocabulary.get(usize::try_from(*token).ok()?);
        tokens.iter().filter_map(known).collect()
    }
}

/// Returns `count` random windows of `length` tokens, one after the other, and for each token the
/// one that follows it in the text. The windows depend on `seed` and `key` alone: a key of step,
/// microbatch and rank gives each microbatch its own.
///
/// # Panics
/// If the text does not have more than `length` tokens.
#[must_use]
pub fn random_windows(
    tokens: &[u32],
    count: usize,
    length: usize,
    seed: u64,
    key: [u64; 3],
) -> [Vec<u32>; 2] {
    let bytes: Vec<u8> = key.iter().flat_map(|part| part.to_le_bytes()).collect();
    let mut rng = ChaCha8Rng::seed_from_u64(xxh3_64_with_seed(&bytes, seed));
    let last = tokens.len() - length - 1;
    let starts = (0..count).map(|_| rng.random_range(0..=last));
    windows(tokens, starts, length)
}

/// Returns the windows of `length` tokens that begin at `starts`, one after the other, and for each
/// token the one that follows it in the text.
///
/// # Panics
/// If a window has no token after it.
#[must_use]
pub fn windows(
    tokens: &[u32],
    starts: impl IntoIterator<Item = usize>,
    length: usize,
) -> [Vec<u32>; 2] {
    let [mut inputs, mut next] = [const { Vec::new() }; 2];
    for start in starts {
        inputs.extend(&tokens[start..start + length]);
        next.extend(&tokens[start + 1..=start + length]);
    }
    [inputs, next]
}
