//! The agreement at the end of a step: the statement of every rank, exchanged before any rank
//! updates. Beside it the interim record of a step, and the agreement at the end of an evaluation.
//!
//! One small all-gather over the world carries the statements. The verdict is a pure function of
//! all statements, so all ranks reach the same one.

use hsdp_sharding::step::Exchange;
use hsdp_sharding::{ModelSpec, Rank};

use crate::agree::buffers::{BufferAgreement, BufferDifference, BufferWords};
use crate::agree::comparison;
use crate::agree::header::check_magic;
use crate::error::{DataError, Error};
use crate::options::objective::Objective;
use crate::state::sighting::{FoundOn, Sighting, first_sighting};

/// The statement of one rank at the end of a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Statement {
    pub(crate) microbatches: u64,
    /// Summed over this rank's microbatches.
    pub(crate) weight: u64,
    /// Summed over this rank's microbatches.
    pub(crate) loss: f64,
    /// The squared 2-norm of this rank's [slices](hsdp_sharding::Plan::slice) of the finished
    /// gradients, before the final division.
    pub(crate) squared_norm: f64,
    /// The first element of this rank's gradient shards that was not finite before the all-reduces,
    /// or of its slices after them.
    pub(crate) sighting: Option<Sighting>,
    /// Word of this rank for [`Context::check_operations`](crate::state::context::Context).
    pub(crate) operations: [u64; 2],
    /// The parameters that got a gradient on this rank.
    pub(crate) presence: GradientPresence,
    /// The buffers of this rank.
    pub(crate) buffers: BufferWords,
}

const FIXED_WORDS: usize = Exchange::STATEMENT;

impl Statement {
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        let fixed =
            [self.microbatches, self.weight, self.loss.to_bits(), self.squared_norm.to_bits()];
        let sighting = Sighting::encode(self.sighting);
        let fixed = fixed.into_iter().chain(self.operations).chain(sighting);
        fixed.chain(self.presence.words().iter().copied()).chain(self.buffers.encode())
    }

    fn decode(words: &[u64], spec: &ModelSpec) -> Self {
        let parameters = spec.params().count();
        let (presence, buffers) = words[FIXED_WORDS..].split_at(parameters.div_ceil(WORD_BITS));
        Self {
            microbatches: words[0],
            weight: words[1],
            loss: f64::from_bits(words[2]),
            squared_norm: f64::from_bits(words[3]),
            operations: [words[4], words[5]],
            sighting: Sighting::decode(&words[6..]),
            presence: GradientPresence::of(parameters, presence),
            buffers: BufferWords::decode(buffers, spec),
        }
    }
}

/// The statements of all ranks, in rank order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Agreement {
    said: Vec<Statement>,
    /// The parameters that got a gradient on any rank.
    anywhere: GradientPresence,
}

impl Agreement {
    /// Decodes the statements of all ranks, which train this model.
    pub(crate) fn decode(gathered: &[u64], ranks: usize, spec: &ModelSpec) -> Self {
        let words = gathered.chunks_exact(gathered.len() / ranks);
        let said: Vec<_> = words.map(|words| Statement::decode(words, spec)).collect();
        let mut anywhere = GradientPresence::none(spec.params().count());
        said.iter().for_each(|said| anywhere.add(&said.presence));
        Self { said, anywhere }
    }

    /// Concludes from the words of all ranks about buffers.
    ///
    /// # Errors
    /// The first buffer that ranks have written differently.
    pub(crate) fn buffers(&self, spec: &ModelSpec) -> Result<BufferAgreement, BufferDifference> {
        let heard: Vec<_> = self.said.iter().map(|said| &said.buffers).collect();
        BufferAgreement::of(spec, &heard)
    }

    /// Returns whether a rank has written a buffer, by its place among all buffers of the model.
    pub(crate) fn has_written(&self, buffer: usize) -> bool {
        self.said.iter().any(|said| said.buffers.writes[buffer] > 0)
    }

    /// Returns the sum of the words of all ranks about their operations.
    pub(crate) fn operations(&self) -> u128 {
        sum_of_words(self.said.iter().map(|said| said.operations))
    }

    /// Returns the exact sum of all weights, if a u64 holds it.
    pub(crate) fn total_weight(&self) -> Option<u64> {
        self.said.iter().try_fold(0_u64, |sum, statement| sum.checked_add(statement.weight))
    }

    /// Returns the shortest prefix of the ranks whose weights overflow a u64 together; all ranks if
    /// none overflows.
    pub(crate) fn too_heavy(&self) -> Vec<Rank> {
        let mut sum = 0_u64;
        let overflows = |said: &Statement| match sum.checked_add(said.weight) {
            Some(more) => {
                sum = more;
                false
            }
            None => true,
        };
        let last = self.said.iter().position(overflows).unwrap_or(self.said.len() - 1);
        (0..=last).map(Rank::new).collect()
    }

    /// Returns the first of the ranks with the greatest weight, and that weight.
    pub(crate) fn heaviest(&self) -> (Rank, u64) {
        let weights = self.said.iter().map(|said| said.weight).enumerate();
        let (rank, weight) = weights.rev().max_by_key(|(_, weight)| *weight).unwrap_or_default();
        (Rank::new(rank), weight)
    }

    /// Returns the sum of all losses, in rank order.
    pub(crate) fn total_loss(&self) -> f64 {
        self.said.iter().map(|statement| statement.loss).sum()
    }

    /// Returns the first rank whose loss makes the running sum, in rank order, infinite or NaN.
    pub(crate) fn first_loss_not_finite(&self) -> Option<Rank> {
        let mut sum = 0.0;
        let ends_it = |statement: &Statement| {
            sum += statement.loss;
            !f64::is_finite(sum)
        };
        self.said.iter().position(ends_it).map(Rank::new)
    }

    /// Returns the number of microbatches of all ranks in total.
    pub(crate) fn total_microbatches(&self) -> u64 {
        self.said.iter().fold(0, |sum, statement| statement.microbatches.saturating_add(sum))
    }

    /// Returns the squared norm of the whole gradient: the sum over all ranks, in rank order.
    pub(crate) fn squared_norm(&self) -> f64 {
        self.said.iter().map(|statement| statement.squared_norm).sum()
    }

    /// Returns the first sighting of all ranks, and the rank that made it.
    pub(crate) fn first_non_finite(&self) -> Option<FoundOn> {
        first_sighting(self.said.iter().map(|statement| statement.sighting))
    }

    /// Returns the parameters that got a gradient on any rank.
    pub(crate) fn present_anywhere(&self) -> &GradientPresence {
        &self.anywhere
    }

    /// Returns whether the step tells anything about parameters without a gradient: whether a rank
    /// had items or, where weights do not enter, gradients.
    pub(crate) fn had_data(&self, objective: Objective) -> bool {
        let had_items = self.said.iter().any(|said| said.weight > 0);
        had_items || (!objective.is_weighted() && !self.anywhere.is_empty())
    }

    /// Returns the ranks that had items and on which `parameter` got no gradient. Where weights do
    /// not enter, every rank counts as having items.
    pub(crate) fn ranks_without(&self, parameter: usize, objective: Objective) -> Vec<usize> {
        let without = |said: &Statement| {
            let had_items = said.weight > 0 || !objective.is_weighted();
            had_items && !said.presence.contains(parameter)
        };
        self.said
            .iter()
            .enumerate()
            .filter(|(_, said)| without(said))
            .map(|(rank, _)| rank)
            .collect()
    }
}

/// Returns the sum of numbers of 128 bits, which wraps around.
pub(crate) fn sum_of_words(words: impl Iterator<Item = [u64; 2]>) -> u128 {
    let number = |[low, high]: [u64; 2]| u128::from(low) | u128::from(high) << 64;
    words.map(number).fold(0, u128::wrapping_add)
}

/// A set of parameter numbers, in 64-bit words that ranks exchange as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GradientPresence {
    parameters: usize,
    words: Vec<u64>,
}

const WORD_BITS: usize = u64::BITS as usize;

impl GradientPresence {
    /// Returns the empty set, of a model of `parameters` parameters.
    pub(crate) fn none(parameters: usize) -> Self {
        Self { parameters, words: vec![0; parameters.div_ceil(WORD_BITS)] }
    }

    /// Returns the set of these words.
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

const INTERIM_WORDS: usize = Exchange::INTERIM;

/// The interim record of one rank, which ranks exchange between the last reduce-scatter and the
/// all-reduces where an overflow is expected. PROTOCOL.md, "Non-finite values".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interim {
    /// The number of all-reduces that the rank has issued.
    pub(crate) all_reduces: usize,
    /// The first element of its partials that is not finite.
    pub(crate) sighting: Option<Sighting>,
}

/// An overflow on some rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overflow {
    /// The largest number of all-reduces that a rank has issued. Every rank issues this many.
    pub(crate) all_reduces: usize,
    /// The first sighting, and the rank that made it.
    pub(crate) found: FoundOn,
}

impl Interim {
    pub(crate) fn encode(self) -> [u64; INTERIM_WORDS] {
        let [when, parameter, from] = Sighting::encode(self.sighting);
        [self.all_reduces as u64, when, parameter, from]
    }

    fn decode(words: &[u64]) -> Self {
        let all_reduces = usize::try_from(words[0]).unwrap_or(usize::MAX);
        Self { all_reduces, sighting: Sighting::decode(&words[1..]) }
    }

    /// Combines the records of all ranks; `None` if all values are finite so far.
    pub(crate) fn overflow(gathered: &[u64]) -> Option<Overflow> {
        let said = || gathered.chunks_exact(INTERIM_WORDS).map(Self::decode);
        let found = first_sighting(said().map(|interim| interim.sighting))?;
        let all_reduces = said().map(|interim| interim.all_reduces).max().unwrap_or(0);
        Some(Overflow { all_reduces, found })
    }
}

/// First word of the record at the end of an evaluation, without its flag: it may meet the record
/// of a batch.
const MEAN_MAGIC: u64 = u64::from_be_bytes(*b"hsdpev2\0");
/// The flag of a rank that takes no mean.
const FINISHES: u64 = 1;
const MEAN_WORDS: usize = Exchange::MEAN;

/// The call by which a rank ends an evaluation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EvaluationEnd {
    /// `mean`, with the sum and the items of this rank.
    Mean { sum: f64, items: u64 },
    /// `finish`.
    Finish,
}

impl EvaluationEnd {
    /// Returns the name of the operation, for errors.
    pub(crate) fn operation(self) -> &'static str {
        match self {
            Self::Mean { .. } => "mean",
            Self::Finish => "finish of an evaluation",
        }
    }

    /// Encodes the record of a rank: its end, sum and items, and its word about operations.
    pub(crate) fn encode(self, [low, high]: [u64; 2]) -> [u64; MEAN_WORDS] {
        match self {
            Self::Mean { sum, items } => [MEAN_MAGIC, sum.to_bits(), items, low, high],
            Self::Finish => [MEAN_MAGIC | FINISHES, 0, 0, low, high],
        }
    }
}

/// Totals of all ranks in an evaluation. PROTOCOL.md, "Evaluation".
#[derive(Debug)]
pub(crate) struct EvaluationTotals {
    sum: f64,
    /// Number of items, which no number of ranks overflows in 128 bits.
    items: u128,
    /// Sum of the words about operations.
    pub(crate) operations: u128,
    /// The flag of each rank.
    ends: Vec<u64>,
}

/// Adds the records of all ranks, in rank order.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn decode_ends(said: &[u64], own: Rank) -> Result<EvaluationTotals, Error> {
    let records = || said.chunks_exact(MEAN_WORDS);
    let magic: Vec<u64> = records().map(|record| record[0] & !FINISHES).collect();
    check_magic(&magic, 1, MEAN_MAGIC, "the protocol of the means", own)?;
    let sum = records().map(|record| f64::from_bits(record[1])).sum();
    let items = records().map(|record| u128::from(record[2])).sum();
    let operations = sum_of_words(records().map(|record| [record[3], record[4]]));
    let ends = records().map(|record| record[0] & FINISHES).collect();
    Ok(EvaluationTotals { sum, items, operations, ends })
}

impl EvaluationTotals {
    /// Returns the sum of all ranks' sums, divided by all ranks' items.
    ///
    /// # Errors
    /// [`DataError::EmptyEvaluation`](crate::DataError::EmptyEvaluation) if there are no items.
    #[expect(clippy::cast_precision_loss, reason = "a mean is reported")]
    pub(crate) fn mean(&self, step: u64) -> Result<f64, Error> {
        match self.items {
            0 => Err(Error::Data(DataError::EmptyEvaluation { step })),
            items => Ok(self.sum / items as f64),
        }
    }

    /// Checks that all ranks have ended the evaluation by the same call.
    ///
    /// # Errors
    /// `Disagreement`, the same on all ranks.
    pub(crate) fn check_ends(&self) -> Result<(), Error> {
        let Some(odd) = comparison::odd_one(&self.ends) else { return Ok(()) };
        let call = |rank: usize| if self.ends[rank] == FINISHES { "`finish`" } else { "`mean`" };
        let [got, want] = odd.map(|rank| call(rank).to_owned());
        let [rank, other] = odd.map(Rank::new);
        let what = "the end of the evaluation".into();
        Err(Error::Disagreement { what, rank, got, other, want })
    }
}

#[cfg(test)]
mod tests {
    use hsdp_sharding::{Param, Unit};

    use super::*;
    use crate::state::sighting::When;

    const FOUND: Sighting = Sighting { when: When::Microbatch(1), parameter: 1, from: Some(0) };

    fn statement(rank: usize) -> Statement {
        let mut presence = GradientPresence::none(70);
        presence.insert(rank);
        presence.insert(69);
        Statement {
            microbatches: 2,
            weight: 10 + rank as u64,
            loss: 0.5,
            squared_norm: 4.0_f64.powi(i32::try_from(rank).expect("small")),
            sighting: (rank == 2).then_some(FOUND),
            operations: [7, rank as u64],
            presence,
            buffers: BufferWords {
                microbatches: 3,
                writes: vec![3, 2],
                digests: vec![rank as u64 / 4],
                averaged: vec![0.5],
            },
        }
    }

    fn spec() -> ModelSpec {
        let params = (0..70).map(|index| Param::new(format!("p.{index}"), [1]));
        let unit = params.fold(Unit::new("only"), Unit::param);
        let unit = unit.param(Param::new("mean", [2]).buffer());
        ModelSpec::new().unit(unit.param(Param::new("own", [1]).averaged_buffer()))
    }

    fn agreement() -> Agreement {
        let gathered = (0..4).flat_map(|rank| statement(rank).words().collect::<Vec<_>>());
        Agreement::decode(&gathered.collect::<Vec<_>>(), 4, &spec())
    }

    #[test]
    fn what_is_said_comes_back() {
        assert_eq!(agreement().said, (0..4).map(statement).collect::<Vec<_>>());
    }

    #[test]
    fn words_about_operations_add_up_and_wrap_around() {
        assert_eq!(agreement().operations(), 28 + (6 << 64));
        let most = [u64::MAX; 2];
        assert_eq!(sum_of_words([most, [1, 0]].into_iter()), 0);
        assert_eq!(sum_of_words([most, [3, 1]].into_iter()), 2 + (1 << 64));
    }

    #[test]
    fn weights_and_squared_norms_add_over_all_ranks() {
        assert_eq!(agreement().total_weight(), Some(46));
        assert_eq!(agreement().squared_norm(), 1.0 + 4.0 + 16.0 + 64.0);
    }

    #[test]
    fn a_loss_that_is_not_finite_is_the_first_of_all_or_their_sum() {
        let mut agreement = agreement();
        assert_eq!(agreement.first_loss_not_finite(), None);
        (agreement.said[1].loss, agreement.said[3].loss) = (f64::MAX, f64::MAX);
        assert_eq!(agreement.first_loss_not_finite(), Some(Rank::new(3)));
        (agreement.said[2].loss, agreement.said[3].loss) = (f64::NAN, f64::INFINITY);
        assert_eq!(agreement.first_loss_not_finite(), Some(Rank::new(2)));
    }

    #[test]
    fn no_number_of_microbatches_overflows() {
        let mut agreement = agreement();
        assert_eq!(agreement.total_microbatches(), 8);
        agreement.said[1].microbatches = u64::MAX;
        assert_eq!(agreement.total_microbatches(), u64::MAX);
    }

    #[test]
    fn weights_that_are_too_much_together_are_those_of_the_first_ranks() {
        let mut agreement = agreement();
        (agreement.said[1].weight, agreement.said[2].weight) = (u64::MAX - 10, 1);
        assert_eq!(agreement.total_weight(), None);
        assert_eq!(agreement.too_heavy(), [0, 1, 2].map(Rank::new));
        assert_eq!(agreement.heaviest(), (Rank::new(1), u64::MAX - 10));
    }

    #[test]
    fn the_first_sighting_is_everybodys() {
        assert_eq!(
            agreement().first_non_finite(),
            Some(FoundOn { rank: Rank::new(2), sighting: FOUND })
        );
    }

    #[test]
    fn presence_is_the_union_and_absence_names_ranks() {
        let agreed = agreement();
        let any = agreed.present_anywhere();
        assert!(any.contains(3) && any.contains(69) && !any.contains(4));
        assert_eq!(agreed.ranks_without(3, Objective::Sum), vec![0, 1, 2]);
        assert_eq!(agreed.ranks_without(69, Objective::Sum), Vec::<usize>::new());
    }

    #[test]
    fn a_step_without_items_has_data_if_weights_do_not_enter_and_gradients_came() {
        let mut agreement = agreement();
        let objectives = [Objective::Sum, Objective::RankMean];
        assert_eq!(objectives.map(|objective| agreement.had_data(objective)), [true, true]);
        agreement.said.iter_mut().for_each(|said| said.weight = 0);
        assert_eq!(objectives.map(|objective| agreement.had_data(objective)), [false, true]);
        agreement.anywhere = GradientPresence::none(70);
        assert_eq!(objectives.map(|objective| agreement.had_data(objective)), [false, false]);
    }

    #[test]
    fn who_has_no_items_misses_no_gradient() {
        let mut agreement = agreement();
        agreement.said[1].weight = 0;
        assert_eq!(agreement.ranks_without(3, Objective::WeightedMean), vec![0, 2]);
        assert_eq!(agreement.ranks_without(3, Objective::RankMean), vec![0, 1, 2]);
    }

    #[test]
    fn an_overflow_on_one_rank_is_one_of_all() {
        let sighting = Sighting { when: When::Microbatch(2), parameter: 1, from: Some(3) };
        let said = |sighting, all_reduces| Interim { all_reduces, sighting }.encode();
        let all = [said(None, 4), said(Some(sighting), 2), said(None, 3)].concat();
        let found = FoundOn { rank: Rank::new(1), sighting };
        assert_eq!(Interim::overflow(&all), Some(Overflow { all_reduces: 4, found }));
        assert_eq!(Interim::overflow(&[said(None, 4), said(None, 2)].concat()), None);
    }
}
