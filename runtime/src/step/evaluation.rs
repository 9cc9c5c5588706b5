//! Evaluations: forwards without a backward, between steps. PROTOCOL.md, "Evaluation".

use std::mem;
use std::sync::atomic::Ordering;

use hsdp_comm::Stage;
use hsdp_sharding::step::Exchange;
use hsdp_sharding::{Rank, UnitId};

use crate::agree::agreement::sum_of_words;
use crate::agree::microbatch_header::{self, check_magic};
use crate::error::Error;
use crate::options::uneven::{Input, Supply};
use crate::state::full::Full;
use crate::state::shard::Shard;
use crate::step::check;
use crate::step::engine::{Engine, NO_ATTEMPT, Opened, State};
use crate::step::gathers::GatherQueue;
use crate::step::step_state::Token;

/// How far an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Between two batches of this rank.
    Between,
    /// In a batch of this rank.
    InBatch,
    /// No rank has another batch.
    Over,
    /// An exchange or a gather has failed on this rank.
    Broken,
}

/// An evaluation that has begun and not ended.
#[derive(Debug)]
pub(crate) struct EvaluationState {
    pub(super) opened: Opened,
    gathers: GatherQueue,
    progress: Progress,
    /// The batches so far. A rank that has no batch left counts those of the others.
    batches: usize,
    supply: Supply,
    /// The first error of this rank, for the other ranks.
    pub(super) failure: Option<String>,
}

impl EvaluationState {
    fn new(opened: Opened) -> Self {
        Self {
            opened,
            gathers: GatherQueue::of_evaluation(),
            progress: Progress::Between,
            batches: 0,
            supply: Supply::default(),
            failure: None,
        }
    }

    /// Whether `token` means the batch that is open.
    pub(super) fn is_at(&self, token: Token) -> bool {
        self.progress == Progress::InBatch
            && token == Token { opened: self.opened, microbatch: self.batches }
    }

    /// Runs `act` and remembers its error. A call that is refused has changed nothing.
    fn note<T>(&mut self, act: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        act(self).inspect_err(|error| {
            self.failure.get_or_insert_with(|| error.to_string());
            if !matches!(error, Error::Misuse { .. }) {
                self.progress = Progress::Broken;
            }
        })
    }

    /// Refuses a call that the evaluation is not ready for.
    fn check(
        &self,
        engine: &Engine,
        operation: &'static str,
        allowed: &[Progress],
    ) -> Result<(), Error> {
        if allowed.contains(&self.progress) {
            return Ok(());
        }
        let failure = || self.failure.as_deref().unwrap_or("an earlier call failed").to_owned();
        let what = match self.progress {
            Progress::Broken => format!("{}: drop the evaluation", failure()),
            Progress::Over => "a mean was taken: no batch may follow".to_owned(),
            Progress::InBatch | Progress::Between => {
                "the last batch was begun and not finished".to_owned()
            }
        };
        Err(engine.context.misuse(operation, self.opened.step, what))
    }

    /// Asks all ranks whether one has another batch, and begins it.
    fn ask(&mut self, engine: &Engine, input: Input) -> Result<Progress, Error> {
        let context = &engine.context;
        let tag = context.tag(None, Stage::Evaluation, self.opened.step, self.batches);
        let before = mem::take(&mut self.supply);
        let decode = |said: &[u64]| microbatch_header::decode(said, context.rank(), before);
        let said = microbatch_header::encode(input);
        self.supply = context.control.exchange_in_step(tag, said, decode)??;
        if self.supply.ready.is_empty() {
            return Ok(Progress::Over);
        }
        context.world.set_absent(&self.supply.exhausted);
        self.gathers.begin(context, self.opened.step, self.batches);
        Ok(Progress::InBatch)
    }

    fn end_batch(&mut self, engine: &Engine, shards: &[Shard]) -> Result<(), Error> {
        self.gathers.finish(&engine.context, shards)?;
        self.batches += 1;
        self.progress = Progress::Between;
        Ok(())
    }

    /// Gathers along in the batches that other ranks still have.
    fn run_out(&mut self, engine: &Engine, shards: &[Shard]) -> Result<(), Error> {
        while self.progress == Progress::Between {
            self.progress = self.ask(engine, Input::Exhausted)?;
            if self.progress == Progress::InBatch {
                self.end_batch(engine, shards)?;
            }
        }
        engine.context.world.set_absent(&[]);
        Ok(())
    }
}

impl Engine {
    /// Begins an evaluation, and returns it with its number. Not collective.
    pub(crate) fn begin_evaluation(&self) -> Result<(Opened, u64), Error> {
        let mut state = self.state_between_steps("evaluation")?;
        state.attempts += 1;
        state.evaluations += 1;
        let (step, attempt) = (state.next_step, state.attempts);
        let opened = Opened { step, attempt, epoch: self.context.world.epoch() };
        self.context.world.set_step(step);
        state.evaluation = Some(EvaluationState::new(opened));
        self.under_way.store(attempt, Ordering::Release);
        Ok((opened, state.evaluations))
    }

    /// Begins this rank's next batch.
    pub(crate) fn begin_batch(&self, opened: Opened) -> Result<Token, Error> {
        self.in_evaluation(opened, "batch", |engine, evaluation, _| {
            evaluation.check(engine, "batch", &[Progress::Between])?;
            evaluation.progress = evaluation.ask(engine, Input::Ready)?;
            Ok(Token { opened, microbatch: evaluation.batches })
        })
    }

    /// The next gather of a unit in the batch that `token` means.
    pub(super) fn unshard_in_batch(
        &self,
        state: &mut State,
        (token, unit): (Token, UnitId),
    ) -> Result<Full, Error> {
        let State { evaluation, shards, .. } = state;
        let evaluation = evaluation.as_mut().expect("the caller has found the batch in it");
        evaluation.note(|evaluation| {
            check::unit(&self.context, token.opened.step, unit, "unshard")?;
            evaluation.gathers.take(&self.context, shards, unit)
        })
    }

    /// Ends the batch that is open.
    pub(super) fn finish_batch(&self, state: &mut State) -> Result<(), Error> {
        let State { evaluation, shards, .. } = state;
        let evaluation = evaluation.as_mut().expect("the caller has found the batch in it");
        evaluation.note(|evaluation| evaluation.end_batch(self, shards))
    }

    /// Gathers along until no rank has another batch, and returns the sum of all ranks' sums, divided by all ranks' items.
    pub(crate) fn evaluated_mean(
        &self,
        opened: Opened,
        (sum, items): (f64, u64),
    ) -> Result<f64, Error> {
        // An error on which all ranks agree leaves the evaluation whole.
        self.in_evaluation(opened, "mean", |engine, evaluation, shards| {
            evaluation.check(engine, "mean", &[Progress::Between, Progress::Over])?;
            evaluation.run_out(engine, shards)?;
            let context = &engine.context;
            let tag = context.tag(None, Stage::Evaluation, opened.step, evaluation.batches);
            let [low, high] = context.operations_word();
            let said = [MAGIC, sum.to_bits(), items, low, high];
            let sums = |said: &[u64]| sums(said, context.rank());
            let sums = context.control.exchange_in_step(tag, said, sums)??;
            context.check_operations(sums.operations)?;
            Ok(sums)
        })
        .and_then(|sums| sums.mean(opened.step))
    }

    /// Ends an evaluation whose means were taken, and aborts any other on all ranks.
    pub(crate) fn end_evaluation(&self, opened: Opened, number: u64) {
        if self.state.is_held_here() {
            return;
        }
        let is_over = |evaluation: &EvaluationState| {
            evaluation.opened == opened && evaluation.progress == Progress::Over
        };
        // Another thread of the rank may wait in a batch: then the evaluation is not over, and the announcement waits for no rank.
        if let Some(mut state) = self.state.try_lock()
            && state.evaluation.as_ref().is_some_and(is_over)
        {
            state.evaluation = None;
            self.under_way.store(NO_ATTEMPT, Ordering::Release);
            return;
        }
        self.abort_evaluation(opened, number);
    }

    fn in_evaluation<T>(
        &self,
        opened: Opened,
        operation: &'static str,
        act: impl FnOnce(&Self, &mut EvaluationState, &[Shard]) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut state = self.enter(operation, opened.step)?;
        let State { evaluation, shards, .. } = &mut *state;
        match evaluation.as_mut().filter(|evaluation| evaluation.opened == opened) {
            Some(evaluation) => evaluation.note(|evaluation| act(self, evaluation, shards)),
            None => {
                let what = "the evaluation is over".to_owned();
                Err(self.context.misuse(operation, opened.step, what))
            }
        }
    }
}

/// The first word of a record of sums: it may meet the record of a batch.
const MAGIC: u64 = u64::from_be_bytes(*b"hsdp-ev1");
const WORDS: usize = Exchange::MEAN;

/// The sums of all ranks.
#[derive(Clone, Copy, Debug)]
struct Sums {
    sum: f64,
    /// In 128 bits no number of ranks overflows it.
    items: u128,
    /// The sum of the words about operations.
    operations: u128,
}

/// Adds the records of all ranks, in rank order.
fn sums(said: &[u64], own: Rank) -> Result<Sums, Error> {
    check_magic(said, (WORDS, MAGIC), ("the protocol of the means", own))?;
    let records = || said.chunks_exact(WORDS);
    let sum = records().map(|record| f64::from_bits(record[1])).sum();
    let items = records().map(|record| u128::from(record[2])).sum();
    let operations = sum_of_words(records().map(|record| [record[3], record[4]]));
    Ok(Sums { sum, items, operations })
}

impl Sums {
    #[expect(clippy::cast_precision_loss, reason = "a mean is reported")]
    fn mean(self, step: u64) -> Result<f64, Error> {
        match self.items {
            0 => Err(Error::EmptyEvaluation { step }),
            items => Ok(self.sum / items as f64),
        }
    }
}
