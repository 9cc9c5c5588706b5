//! The record of a rank's sum in an evaluation, and the mean that the ranks conclude. PROTOCOL.md,
//! "Evaluation".

use hsdp_sharding::Rank;
use hsdp_sharding::step::Exchange;

use crate::agree::agreement::sum_of_words;
use crate::agree::microbatch_header::check_magic;
use crate::error::Error;

/// First word of the record: it may meet the record of a batch.
const MAGIC: u64 = u64::from_be_bytes(*b"hsdp-ev1");
const WORDS: usize = Exchange::MEAN;

/// Totals of all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Totals {
    sum: f64,
    /// Number of items, which no number of ranks overflows in 128 bits.
    items: u128,
    /// Sum of the words about operations.
    pub(crate) operations: u128,
}

/// Encodes the record of a rank: its sum, its items, and its word about operations.
pub(crate) fn encode(sum: f64, items: u64, [low, high]: [u64; 2]) -> [u64; WORDS] {
    [MAGIC, sum.to_bits(), items, low, high]
}

/// Adds the records of all ranks, in rank order.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn decode(said: &[u64], own: Rank) -> Result<Totals, Error> {
    check_magic(said, (WORDS, MAGIC), ("the protocol of the means", own))?;
    let records = || said.chunks_exact(WORDS);
    let sum = records().map(|record| f64::from_bits(record[1])).sum();
    let items = records().map(|record| u128::from(record[2])).sum();
    let operations = sum_of_words(records().map(|record| [record[3], record[4]]));
    Ok(Totals { sum, items, operations })
}

impl Totals {
    /// Returns the sum of all ranks' sums, divided by all ranks' items.
    ///
    /// # Errors
    /// [`Error::EmptyEvaluation`] if there are no items.
    #[expect(clippy::cast_precision_loss, reason = "a mean is reported")]
    pub(crate) fn mean(self, step: u64) -> Result<f64, Error> {
        match self.items {
            0 => Err(Error::EmptyEvaluation { step }),
            items => Ok(self.sum / items as f64),
        }
    }
}
