//! An evaluation: forwards between steps. Those of an evaluation with a backward take part in the
//! backward of another model.

use super::exchange::{Batches, Conclusion, Exchange};
use super::gathers::GatherQueue;
use super::inputs::{Goal, Refused};
use super::order::PlanOrders;
use super::output::Output;
use super::rules::{EvaluationKind, Input, Supply};
use crate::UnitId;

/// How far an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchProgress {
    /// Between two batches of this rank.
    Between,
    /// In a batch.
    InBatch,
    /// No rank has another batch: the ranks exchange sums, which ends the evaluation.
    Over,
}

/// An evaluation that is under way.
#[derive(Debug)]
pub(super) struct EvaluationCourse {
    progress: BatchProgress,
    /// Batches so far. A rank that has no batch left counts those of the others.
    pub(super) batches: usize,
    pub(super) gathers: GatherQueue,
    /// The ranks with and without another batch, as of the last question.
    pub(super) supply: Supply,
}

/// The inputs of an evaluation. Each returns the goal of its answer.
impl EvaluationCourse {
    pub(super) fn new(kind: EvaluationKind) -> Self {
        Self {
            progress: BatchProgress::Between,
            batches: 0,
            gathers: GatherQueue::of_evaluation(kind),
            supply: Supply::default(),
        }
    }

    pub(super) fn begin_batch(&self) -> Result<Goal, Refused> {
        self.check_between("begin_batch").map(|()| Goal::Microbatch)
    }

    pub(super) fn need(&mut self, unit: UnitId, orders: &PlanOrders) -> Result<Goal, Refused> {
        self.check_open("need")?;
        self.gathers.check(orders, unit, self.batches)?;
        self.gathers.find(orders, unit);
        Ok(Goal::Unit(unit))
    }

    pub(super) fn end_batch(&self) -> Result<Goal, Refused> {
        self.check_open("end_microbatch").map(|()| Goal::EndMicrobatch)
    }

    pub(super) fn end(&self) -> Result<Goal, Refused> {
        self.check_between("end_evaluation").map(|()| Goal::Finish)
    }

    pub(super) fn is_open(&self) -> bool {
        self.progress == BatchProgress::InBatch
    }

    fn check_between(&self, input: &'static str) -> Result<(), Refused> {
        match self.progress {
            BatchProgress::Between => Ok(()),
            BatchProgress::InBatch => Err(Refused::Unfinished { microbatch: self.batches }),
            BatchProgress::Over => Err(Refused::OutOfTurn { input }),
        }
    }

    fn check_open(&self, input: &'static str) -> Result<(), Refused> {
        if self.is_open() { Ok(()) } else { Err(Refused::OutOfTurn { input }) }
    }

    /// Takes the conclusion from an exchange. If a rank has another batch, all gather along.
    pub(super) fn conclude(&mut self, conclusion: Conclusion, orders: &mut PlanOrders) {
        match conclusion {
            Conclusion::Batches(Batches { supply, gathers_again }) => {
                self.progress = if supply.ready.is_empty() {
                    BatchProgress::Over
                } else {
                    if gathers_again {
                        orders.gather_again();
                    }
                    self.gathers.begin(orders);
                    BatchProgress::InBatch
                };
                self.supply = supply;
            }
            Conclusion::Unit(place, next) => self.gathers.take_next_unit(place, next),
            _ => {}
        }
    }

    /// Returns the next output to the goal; `None` if it is answered.
    pub(super) fn next(&mut self, goal: Goal, orders: &mut PlanOrders) -> Option<Output> {
        match goal {
            Goal::Microbatch => Some(Output::Exchange(Exchange::Batch(Input::Ready))),
            Goal::Unit(unit) => self.unit_next(unit, orders),
            Goal::EndMicrobatch => self.end_batch_next(orders),
            Goal::Finish => self.end_next(orders),
            Goal::Nothing => self.gathers.prefetch_next(orders),
            Goal::Begin
            | Goal::Statistics { .. }
            | Goal::Loss
            | Goal::Gradients(_)
            | Goal::Slices(_)
            | Goal::WholeShards => None,
        }
    }

    fn unit_next(&mut self, unit: UnitId, orders: &mut PlanOrders) -> Option<Output> {
        if let Some(output) = self.gathers.find_next(orders) {
            return Some(output);
        }
        let place = self.gathers.place_of(unit)?;
        if self.gathers.is_backward(place)
            && let Some(output) = self.gathers.end_forward_next(orders)
        {
            return Some(output);
        }
        let end = self.gathers.end_of_prefetch(place, orders.declared().plan.options().prefetch);
        self.gathers.take_next(orders, place, end)
    }

    fn end_batch_next(&mut self, orders: &mut PlanOrders) -> Option<Output> {
        self.gathers.end_finding();
        let output = self.gathers.find_next(orders);
        let output = output.or_else(|| self.gathers.finish_next(orders, usize::MAX));
        if output.is_none() {
            self.batches += 1;
            self.progress = BatchProgress::Between;
        }
        output
    }

    fn end_next(&mut self, orders: &mut PlanOrders) -> Option<Output> {
        if self.is_open()
            && let Some(output) = self.end_batch_next(orders)
        {
            return Some(output);
        }
        Some(Output::Exchange(match self.progress {
            BatchProgress::Over => Exchange::Mean,
            BatchProgress::Between | BatchProgress::InBatch => Exchange::Batch(Input::Exhausted),
        }))
    }
}
