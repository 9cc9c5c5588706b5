//! An evaluation: forwards without a backward, between steps.

use super::gathers::{Gathers, Purpose};
use super::{Exchange, Goal, Input, Output, Refused, State, StepMachine, Supply};

/// How far an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Between two batches of this rank.
    Between,
    /// In a batch.
    InBatch,
    /// No rank has another batch.
    Over,
}

/// An evaluation that is under way.
#[derive(Debug)]
pub(super) struct Evaluation {
    progress: Progress,
    /// Batches so far. A rank that has no batch left counts those of the others.
    pub(super) batches: usize,
    pub(super) gathers: Gathers,
    /// The ranks with and without another batch, as of the last question.
    pub(super) supply: Supply,
}

impl Evaluation {
    pub(super) fn is_open(&self) -> bool {
        self.progress == Progress::InBatch
    }

    pub(super) fn check_open(&self, input: &'static str) -> Result<(), Refused> {
        match self.progress {
            Progress::InBatch => Ok(()),
            Progress::Between | Progress::Over => Err(Refused::OutOfTurn { input }),
        }
    }
}

impl StepMachine {
    /// Begins an evaluation. Not collective.
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`].
    pub fn evaluate(&mut self) -> Result<(), Refused> {
        self.check_idle("evaluate")?;
        if !matches!(self.state, State::Between) {
            return Err(Refused::OutOfTurn { input: "evaluate" });
        }
        let gathers = Gathers::new(Purpose::Evaluation(None));
        let evaluation = Evaluation {
            progress: Progress::Between,
            batches: 0,
            gathers,
            supply: Supply::default(),
        };
        self.state = State::Evaluation(Box::new(evaluation));
        Ok(())
    }

    /// Begins this rank's next batch. Collective over the world.
    ///
    /// # Errors
    /// [`Refused::Unfinished`], [`Refused::OutOfTurn`].
    pub fn begin_batch(&mut self) -> Result<(), Refused> {
        let evaluation = self.evaluation("begin_batch")?;
        match evaluation.progress {
            Progress::Between => self.goal = Goal::Batch,
            Progress::InBatch => {
                return Err(Refused::Unfinished { microbatch: evaluation.batches });
            }
            Progress::Over => return Err(Refused::OutOfTurn { input: "begin_batch" }),
        }
        Ok(())
    }

    /// Takes part in the batches that other ranks still have, and exchanges sums. Collective over
    /// the world.
    ///
    /// # Errors
    /// [`Refused::Unfinished`], [`Refused::OutOfTurn`].
    pub fn mean(&mut self) -> Result<(), Refused> {
        let evaluation = self.evaluation("mean")?;
        if evaluation.progress == Progress::InBatch {
            return Err(Refused::Unfinished { microbatch: evaluation.batches });
        }
        self.goal = Goal::Mean;
        Ok(())
    }

    /// Ends an evaluation whose mean was taken.
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`] if it was not: then [`abort`](Self::abort) ends it.
    pub fn end_evaluation(&mut self) -> Result<(), Refused> {
        if self.evaluation("end_evaluation")?.progress != Progress::Over {
            return Err(Refused::OutOfTurn { input: "end_evaluation" });
        }
        self.state = State::Between;
        Ok(())
    }

    fn evaluation(&mut self, input: &'static str) -> Result<&mut Evaluation, Refused> {
        self.check_idle(input)?;
        match &mut self.state {
            State::Evaluation(evaluation) => Ok(evaluation),
            _ => Err(Refused::OutOfTurn { input }),
        }
    }

    pub(super) fn end_batch_next(&mut self) -> Option<Output> {
        let Self { orders, state, .. } = self;
        let State::Evaluation(evaluation) = state else { return None };
        evaluation.gathers.end_finding();
        let output = evaluation.gathers.find_next(orders);
        let output = output.or_else(|| evaluation.gathers.finish_next(usize::MAX));
        if output.is_none() {
            evaluation.batches += 1;
            evaluation.progress = Progress::Between;
        }
        output
    }

    pub(super) fn mean_next(&mut self) -> Option<Output> {
        loop {
            let State::Evaluation(evaluation) = &mut self.state else { return None };
            match evaluation.progress {
                Progress::InBatch => {
                    if let Some(output) = self.end_batch_next() {
                        return Some(output);
                    }
                }
                Progress::Between => {
                    return Some(Output::Exchange(Exchange::Batch(Input::Exhausted)));
                }
                Progress::Over => return Some(Output::Exchange(Exchange::Mean)),
            }
        }
    }

    /// Takes the ranks that have another batch. If one has, all gather along.
    pub(super) fn take_batch(&mut self, supply: Supply) {
        let State::Evaluation(evaluation) = &mut self.state else { return };
        evaluation.progress = if supply.ready.is_empty() {
            Progress::Over
        } else {
            evaluation.gathers.begin(&self.orders);
            Progress::InBatch
        };
        evaluation.supply = supply;
        if self.goal == Goal::Batch {
            self.goal = Goal::Nothing;
        }
    }
}
