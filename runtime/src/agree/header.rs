//! The headers that ranks exchange before data: of a step, with the samples of its data, and of a
//! microbatch.
//!
//! They detect, before any data moves, a rank that is at another step (because it failed between
//! `finish` and the optimizer, for example), has another plan or other options, or has updated the
//! last step in another way.

use hsdp_comm::Stage;
use hsdp_sharding::Rank;
use hsdp_sharding::step::{Batches, EvaluationKind, Exchange, Headers, Intent};

use crate::agree::comparison;
use crate::error::{DataError, Error};
use crate::options::{Input, NO_SAMPLES, Samples, Shutdown, Supply};
use crate::state::context::Context;

/// The header of one rank at the beginning of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepHeader {
    pub(crate) step: u64,
    /// Steps that an optimizer has completed on this rank, with an update or a skip.
    pub(crate) committed: u64,
    /// The digest of options and plan.
    pub(crate) model: u64,
    /// The digest of the order of units; 0 until the ranks have agreed on one.
    pub(crate) order: u64,
    /// The digest of the update of the step before.
    pub(crate) update: u64,
    pub(crate) loss_scale: u64,
    /// The approximate weight of a microbatch; 0 means unknown. May differ between ranks.
    pub(crate) weight_hint: u64,
    /// The step, with data or without, or the end of the run. May differ between ranks, except for
    /// the number of microbatches.
    pub(crate) intent: Intent,
    /// Whether the rank asks that this step be the last. May differ between ranks.
    pub(crate) shutdown: Shutdown,
    /// The digest of the rank's samples, if it names them. The header has a flag for it; the next
    /// exchange carries the digest. May differ between ranks.
    pub(crate) samples: Option<Samples>,
    /// The gathers of the last update's slices. May differ between ranks.
    pub(crate) slices: SlicesSay,
}

/// A rank's record of the gathers of the last update's slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlicesSay {
    /// They are complete, or under way in the epoch of the record.
    Gathered,
    /// Some are lost, or were not issued.
    Lost,
}

impl SlicesSay {
    fn flag(self) -> u64 {
        match self {
            Self::Gathered => 0,
            Self::Lost => LOST_SLICES,
        }
    }
}

/// The result of the headers of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Conclusion from which the order of the step follows.
    pub(crate) headers: Headers,
    /// Whether any rank asks that this step be the last.
    pub(crate) shutdown: Shutdown,
}

const WORDS: usize = Exchange::HEADER;
/// The first word, except its lowest byte, which holds flags.
const MAGIC: u64 = u64::from_be_bytes(*b"hsdpst4\0");
const FLAGS: u64 = 0xff;
const EXHAUSTED: u64 = 1;
const ENDS: u64 = 2;
const SHUTDOWN: u64 = 4;
const NAMES_SAMPLES: u64 = 8;
const LOST_SLICES: u64 = 16;
const UNKNOWN: u64 = u64::MAX;
const MICROBATCHES: usize = 3;
const HINT: usize = WORDS - 1;

impl StepHeader {
    pub(crate) fn encode(&self) -> [u64; WORDS] {
        let (intent, microbatches) = match self.intent {
            Intent::Step { microbatches, input: Input::Ready } => (0, microbatches),
            Intent::Step { microbatches, input: Input::Exhausted } => (EXHAUSTED, microbatches),
            Intent::End => (ENDS, None),
        };
        [
            MAGIC
                | intent
                | match self.shutdown {
                    Shutdown::NotAsked => 0,
                    Shutdown::Asked => SHUTDOWN,
                }
                | self.samples.map_or(0, |_| NAMES_SAMPLES)
                | self.slices.flag(),
            self.step,
            self.committed,
            microbatches.map_or(UNKNOWN, |count| count as u64),
            self.model,
            self.order,
            self.update,
            self.loss_scale,
            self.weight_hint,
        ]
    }

    /// Compares the headers of all ranks and combines them.
    ///
    /// # Errors
    /// `Disagreement` names the first field in which ranks differ, and the first rank that differs
    /// from the majority in this field; without a majority, the first rank that differs from rank
    /// 0.
    pub(crate) fn agree(gathered: &[u64]) -> Result<Agreed, Error> {
        let all = || gathered.chunks_exact(WORDS);
        compare(gathered)?;
        let ending = (0..).map(Rank::new).zip(all()).filter(|(_, header)| ends(header));
        let headers = Headers {
            supply: Supply::of(all().map(input)),
            ending: ending.map(|(rank, _)| rank).collect(),
            weight_hint: all().map(|header| header[HINT]).max().unwrap_or(0),
            names_samples: all().any(|header| header[0] & NAMES_SAMPLES != 0),
            gathers_again: all().any(|header| header[0] & LOST_SLICES != 0),
        };
        Ok(Agreed { headers, shutdown: all().map(shutdown).max().unwrap_or_default() })
    }
}

fn input(header: &[u64]) -> Input {
    if header[0] & (EXHAUSTED | ENDS) == 0 { Input::Ready } else { Input::Exhausted }
}

fn ends(header: &[u64]) -> bool {
    header[0] & ENDS != 0
}

fn shutdown(header: &[u64]) -> Shutdown {
    if header[0] & SHUTDOWN == 0 { Shutdown::NotAsked } else { Shutdown::Asked }
}

fn compare(gathered: &[u64]) -> Result<(), Error> {
    const FIELDS: [&str; WORDS - 1] = [
        "the protocol of the step header",
        "the number of the step",
        "the number of committed steps",
        "the number of microbatches of the step",
        comparison::MODEL,
        "the order of units",
        comparison::UPDATE,
        "the loss scale",
    ];
    let headers = || gathered.chunks_exact(WORDS);
    let one_ends = headers().any(ends);
    for (field, what) in FIELDS.into_iter().enumerate() {
        let value = |header: &[u64]| match field {
            0 => header[0] & !FLAGS,
            // A rank that makes no step has no number of microbatches either.
            MICROBATCHES if one_ends => UNKNOWN,
            field => header[field],
        };
        let first = headers().map(value).next();
        if headers().map(value).all(|value| Some(value) == first) {
            continue;
        }
        let values: Vec<u64> = headers().map(value).collect();
        if let Some([rank, other]) = comparison::odd_one(&values) {
            let said = |rank: usize| gathered[rank * WORDS + field];
            let [got, want] = [rank, other].map(|rank| describe(field, said(rank)));
            let [rank, other] = [rank, other].map(Rank::new);
            return Err(Error::Disagreement { what: what.into(), rank, got, other, want });
        }
    }
    Ok(())
}

fn describe(field: usize, value: u64) -> String {
    match (field, value) {
        (MICROBATCHES, UNKNOWN) => "as many as come".to_owned(),
        (1..=3, value) => value.to_string(),
        (7, value) => f64::from_bits(value).to_string(),
        (_, value) => format!("{value:#018x}"),
    }
}

const MICROBATCH_WORDS: usize = Exchange::MICROBATCH;
const MICROBATCH_MAGIC: u64 = u64::from_be_bytes(*b"hsdp-mb1");

/// Encodes the microbatch header of a rank: 16 bytes that ranks exchange before each microbatch of
/// a step whose number of microbatches was not given, and once more when they have no more
/// microbatches. PROTOCOL.md, "Records".
pub(crate) fn encode_microbatch(input: Input) -> [u64; MICROBATCH_WORDS] {
    [MICROBATCH_MAGIC, if input == Input::Exhausted { EXHAUSTED } else { 0 }]
}

/// Decodes the microbatch headers of all ranks.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn decode_microbatches(gathered: &[u64], own: Rank) -> Result<Supply, Error> {
    supply(gathered, "the protocol of the microbatch header", own)
}

/// Returns which ranks are exhausted, by their records.
fn supply(gathered: &[u64], protocol: &'static str, own: Rank) -> Result<Supply, Error> {
    check_magic(gathered, MICROBATCH_WORDS, MICROBATCH_MAGIC, protocol, own)?;
    let input =
        |record: &[u64]| if record[1] & EXHAUSTED == 0 { Input::Ready } else { Input::Exhausted };
    Ok(Supply::of(gathered.chunks_exact(MICROBATCH_WORDS).map(input)))
}

/// The flag of a rank whose evaluation gathers for a backward, beside [`EXHAUSTED`] and
/// [`LOST_SLICES`].
const WITH_BACKWARD: u64 = 2;

/// Encodes the record of a rank before each batch of an evaluation, and once more when it has no
/// more batches. PROTOCOL.md, "Evaluation".
pub(crate) fn encode_batch(
    input: Input,
    kind: EvaluationKind,
    slices: SlicesSay,
) -> [u64; MICROBATCH_WORDS] {
    let [magic, flags] = encode_microbatch(input);
    let with_backward = if kind == EvaluationKind::WithBackward { WITH_BACKWARD } else { 0 };
    [magic, flags | with_backward | slices.flag()]
}

/// Decodes the records of all ranks about a batch.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's, or the first one
/// with another kind of evaluation, the same on all ranks.
pub(crate) fn decode_batches(gathered: &[u64], own: Rank) -> Result<Batches, Error> {
    let supply = supply(gathered, "the protocol of the batches", own)?;
    let kind = |record: &[u64]| record[1] & WITH_BACKWARD;
    let kinds: Vec<u64> = gathered.chunks_exact(MICROBATCH_WORDS).map(kind).collect();
    if let Some(odd) = comparison::odd_one(&kinds) {
        let call = |rank: usize| match kinds[rank] {
            WITH_BACKWARD => "`evaluation_with_backward`",
            _ => "`evaluation`",
        };
        let [got, want] = odd.map(|rank| call(rank).to_owned());
        let [rank, other] = odd.map(Rank::new);
        let what = "the kind of the evaluation".into();
        return Err(Error::Disagreement { what, rank, got, other, want });
    }
    let mut records = gathered.chunks_exact(MICROBATCH_WORDS);
    Ok(Batches { supply, gathers_again: records.any(|record| record[1] & LOST_SLICES != 0) })
}

/// Compares the first words of the records of all ranks.
///
/// # Errors
/// `Disagreement` names the first rank whose protocol differs from this rank's.
pub(crate) fn check_magic(
    gathered: &[u64],
    words: usize,
    magic: u64,
    what: &'static str,
    own: Rank,
) -> Result<(), Error> {
    let mut firsts = gathered.iter().step_by(words);
    let Some(rank) = firsts.position(|first| *first != magic) else { return Ok(()) };
    let [got, want] = [gathered[rank * words], magic].map(|magic| format!("{magic:#018x}"));
    Err(Error::Disagreement { what: what.into(), rank: Rank::new(rank), got, other: own, want })
}

/// Compares the digests of the samples of all ranks, which finds two ranks with the same ones. A
/// rank without data has named none. Collective over the world. PROTOCOL.md, "A step".
///
/// # Errors
/// [`DataError::SameSamples`](crate::DataError::SameSamples) on all ranks; [`Error::Comm`].
pub(crate) fn compare_samples(context: &Context, header: &StepHeader) -> Result<(), Error> {
    let step = header.step;
    let has_data = matches!(header.intent, Intent::Step { input: Input::Ready, .. });
    let said = header.samples.filter(|_| has_data).map_or(NO_SAMPLES, Samples::digest);
    match context.control.exchange(context.tag(None, Stage::Header, step, 0), [said], twins)? {
        None => Ok(()),
        Some([first, second]) => {
            let [rank, other] = [second, first].map(Rank::new);
            Err(Error::Data(DataError::SameSamples { step, rank, other }))
        }
    }
}

/// Returns the first two ranks that have named the same samples.
fn twins(said: &[u64]) -> Option<[usize; 2]> {
    let named = || said.iter().enumerate().filter(|(_, digest)| **digest != NO_SAMPLES);
    named().find_map(|(second, digest)| {
        let first = named().take_while(|(rank, _)| *rank < second).find(|(_, it)| *it == digest);
        first.map(|(first, _)| [first, second])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> StepHeader {
        StepHeader {
            step: 7,
            committed: 7,
            model: 1,
            order: 3,
            update: 2,
            loss_scale: 1.0_f64.to_bits(),
            weight_hint: 0,
            intent: Intent::Step { microbatches: Some(4), input: Input::Ready },
            shutdown: Shutdown::NotAsked,
            samples: None,
            slices: SlicesSay::Gathered,
        }
    }

    fn agree(headers: &[StepHeader]) -> Result<Agreed, Error> {
        let said: Vec<u64> = headers.iter().flat_map(StepHeader::encode).collect();
        StepHeader::agree(&said)
    }

    #[test]
    fn a_header_is_72_bytes() {
        assert_eq!(header().encode().len() * size_of::<u64>(), 72);
    }

    #[test]
    fn equal_headers_agree_on_the_largest_hint() {
        let hints = [3, 9, 0].map(|weight_hint| StepHeader { weight_hint, ..header() });
        assert_eq!(agree(&hints).expect("they agree").headers.weight_hint, 9);
    }

    #[test]
    fn ranks_without_data_are_known() {
        let out = StepHeader {
            intent: Intent::Step { microbatches: Some(4), input: Input::Exhausted },
            ..header()
        };
        let supply = agree(&[header(), out, header()]).expect("they agree").headers.supply;
        assert_eq!(supply.exhausted, [Rank::new(1)]);
        assert_eq!(supply.ready, [0, 2].map(Rank::new));
    }

    #[test]
    fn one_rank_that_asks_for_the_end_is_heard_by_all_and_has_data() {
        let asks = StepHeader { shutdown: Shutdown::Asked, ..header() };
        let Agreed { headers: Headers { supply, ending, .. }, shutdown } =
            agree(&[header(), asks]).expect("they agree");
        assert_eq!((shutdown, ending.len(), supply.ready.len()), (Shutdown::Asked, 0, 2));
        assert_eq!(agree(&[header()]).expect("it agrees").shutdown, Shutdown::NotAsked);
    }

    #[test]
    fn one_rank_that_names_its_samples_has_all_compare() {
        let names = StepHeader { samples: Some(Samples::of([1])), ..header() };
        assert!(agree(&[header(), names]).expect("they agree").headers.names_samples);
        assert!(!agree(&[header()]).expect("it agrees").headers.names_samples);
    }

    #[test]
    fn a_rank_that_ends_its_run_has_no_data_and_no_number_of_microbatches() {
        let end = StepHeader { intent: Intent::End, ..header() };
        let Headers { supply, ending, .. } = agree(&[header(), end]).expect("they agree").headers;
        assert_eq!((supply.exhausted, ending), (vec![Rank::new(1)], vec![Rank::new(1)]));
        let behind = StepHeader { committed: 6, ..end };
        let message = agree(&[header(), behind]).unwrap_err().to_string();
        assert!(message.starts_with("the number of committed steps differs"), "{message}");
    }

    #[test]
    fn a_rank_that_did_not_update_is_named() {
        let behind = StepHeader { committed: 6, ..header() };
        let message = agree(&[header(), header(), behind]).unwrap_err().to_string();
        assert_eq!(
            message,
            "the number of committed steps differs between ranks: rank 2 has 6, rank 0 has 7"
        );
    }

    #[test]
    fn the_odd_one_is_named_and_not_who_is_compared_with_it() {
        let behind = StepHeader { committed: 6, ..header() };
        let message = agree(&[behind, header(), header()]).unwrap_err().to_string();
        assert_eq!(
            message,
            "the number of committed steps differs between ranks: rank 0 has 6, rank 1 has 7"
        );
    }

    #[test]
    fn what_is_said_comes_back_and_another_protocol_is_named() {
        let mut said = [Input::Ready, Input::Exhausted].map(encode_microbatch).concat();
        let supply = decode_microbatches(&said, Rank::new(0)).expect("one protocol");
        assert_eq!(
            (&*supply.ready, &*supply.exhausted),
            (&[Rank::new(0)][..], &[Rank::new(1)][..])
        );
        said[MICROBATCH_WORDS] += 1;
        let message = decode_microbatches(&said, Rank::new(0)).unwrap_err().to_string();
        let expected = "the protocol of the microbatch header differs between ranks: rank 1 has 0x";
        assert!(message.starts_with(expected), "{message}");
    }

    #[test]
    fn the_first_two_that_are_the_same_are_found_and_who_named_none_is_not() {
        assert_eq!(twins(&[]), None);
        assert_eq!(twins(&[0, 0, 7, 0]), None);
        assert_eq!(twins(&[5, 0, 7, 5, 7]), Some([0, 3]));
    }
}
