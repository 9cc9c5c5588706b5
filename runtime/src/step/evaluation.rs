//! Evaluations: forwards without a backward, between steps. PROTOCOL.md, "Evaluation".

use std::sync::atomic::Ordering;

use hsdp_comm::Stage;
use hsdp_sharding::step::{Conclusion, Refused};

use crate::agree::agreement;
use crate::error::Error;
use crate::state::context::Context;
use crate::step::attempt::{Attempt, Opened, Token};
use crate::step::engine::{Engine, NO_ATTEMPT};
use crate::step::state::{EvaluationState, State};

impl Engine {
    /// Begins an evaluation, and returns it with its number. Not collective.
    pub(crate) fn begin_evaluation(&self) -> Result<(Opened, u64), Error> {
        let mut state = self.state_between_steps("evaluation")?;
        state.machine.evaluate().expect("no step is under way");
        state.attempts += 1;
        state.evaluations += 1;
        let (step, attempt) = (state.next_step, state.attempts);
        let opened = Opened { step, attempt, epoch: self.context.world.epoch() };
        self.context.world.set_step(step);
        state.attempt = Some(Attempt::new(opened));
        state.evaluation = Some(EvaluationState::default());
        self.under_way.store(opened.attempt, Ordering::Release);
        Ok((opened, state.evaluations))
    }

    /// Begins this rank's next batch.
    pub(crate) fn begin_batch(&self, opened: Opened) -> Result<Token, Error> {
        self.in_evaluation(opened, "batch", |context, state| {
            let begun = state.machine.begin_batch();
            begun.map_err(|refused| state.refused_in_evaluation(context, "batch", refused))?;
            state.drive(context, "batch")?;
            Ok(Token { opened, microbatch: state.machine.microbatches() })
        })
    }

    /// Gathers along until no rank has another batch, and returns the sum of all ranks' sums,
    /// divided by all ranks' items.
    pub(crate) fn evaluated_mean(
        &self,
        opened: Opened,
        (sum, items): (f64, u64),
    ) -> Result<f64, Error> {
        let totals = self.in_evaluation(opened, "mean", |context, state| {
            let asked = state.machine.mean();
            asked.map_err(|refused| state.refused_in_evaluation(context, "mean", refused))?;
            state.evaluation_mut().own = (sum, items);
            state.drive(context, "mean")?;
            Ok(state.evaluation_mut().totals.take().expect("the ranks have added up their sums"))
        });
        // An error on which all ranks agree leaves the evaluation whole.
        totals?.mean(opened.step)
    }

    /// Ends an evaluation whose means were taken, and aborts any other on all ranks.
    pub(crate) fn end_evaluation(&self, opened: Opened, number: u64) {
        if self.state.is_held_here() {
            return;
        }
        // Another thread of the rank may wait in a batch: then the evaluation is not over, and the
        // announcement waits for no rank.
        if let Some(mut state) = self.state.try_lock()
            && state.attempt.as_ref().is_some_and(|attempt| attempt.opened == opened)
            && state.machine.end_evaluation().is_ok()
        {
            (state.attempt, state.evaluation) = (None, None);
            self.under_way.store(NO_ATTEMPT, Ordering::Release);
            return;
        }
        self.abort_evaluation(opened, number);
    }

    fn in_evaluation<T>(
        &self,
        opened: Opened,
        operation: &'static str,
        act: impl FnOnce(&Context, &mut State) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut state = self.enter(operation, opened.step)?;
        if state.attempt.as_ref().is_none_or(|attempt| attempt.opened != opened) {
            let what = "the evaluation is over".to_owned();
            return Err(self.context.misuse(operation, opened.step, what));
        }
        state.attempt(&self.context, operation, |state| act(&self.context, state))
    }
}

impl State {
    fn evaluation_mut(&mut self) -> &mut EvaluationState {
        self.evaluation.as_mut().expect("an evaluation is under way")
    }

    fn refused_in_evaluation(
        &self,
        context: &Context,
        operation: &'static str,
        refused: Refused,
    ) -> Error {
        let what = match refused {
            Refused::Unfinished { .. } => "the last batch was begun and not finished",
            Refused::OutOfTurn { .. } => "a mean was taken: no batch may follow",
            refused => return self.refused(context, operation, refused),
        };
        context.misuse(operation, self.next_step, what.to_owned())
    }

    /// Adds up the sums of all ranks.
    pub(super) fn add_up(&mut self, context: &Context) -> Result<Conclusion, Error> {
        let tag = context.tag(None, Stage::Evaluation, self.next_step, self.machine.microbatches());
        let (sum, items) = self.evaluation_mut().own;
        let said = agreement::encode_mean(sum, items, context.operations_word());
        let decode = |said: &[u64]| agreement::decode_means(said, context.rank());
        let totals = context.control.exchange_in_step(tag, said, decode)??;
        context.check_operations(totals.operations)?;
        self.evaluation_mut().totals = Some(totals);
        Ok(Conclusion::Agreed)
    }
}
