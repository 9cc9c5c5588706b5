//! A step: its microbatches, one after the other. `finish` has its end.

use super::finish::Stage;
use super::gathers::{Gathers, Purpose};
use super::order::Order;
use super::reductions::{Reductions, Turn, has_reductions};
use super::rules::reduces_once;
use super::{
    Conclusion, Exchange, Goal, Headers, Input, Operation, Output, Refused, Rules, State,
    StepMachine, Supply, Weights,
};
use crate::{Plan, UnitId};

/// A step that is under way.
#[derive(Debug)]
pub(super) struct Training {
    /// Number of microbatches, if it was given.
    pub(super) microbatches: Option<usize>,
    /// Whether another microbatch may follow, where no number was given.
    pub(super) may_follow: bool,
    /// Microbatches finished so far.
    pub(super) finished: usize,
    pub(super) open: Option<Open>,
    /// Whether the ranks know the size of weights, so far as they need it.
    knows_weights: bool,
    pub(super) gathers: Gathers,
    pub(super) reductions: Reductions,
    /// The ranks with and without data, as of the last question.
    pub(super) supply: Supply,
    /// How far its end is.
    pub(super) stage: Stage,
}

/// A microbatch that is under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Open {
    has_loss: bool,
}

impl Training {
    pub(super) fn new(
        plan: &Plan,
        weights: Weights,
        microbatches: Option<usize>,
        headers: Headers,
    ) -> Self {
        Self {
            microbatches,
            may_follow: true,
            finished: 0,
            open: None,
            knows_weights: weights == Weights::Ignored || headers.weight_hint > 0,
            gathers: Gathers::new(Purpose::Training),
            reductions: Reductions::new(plan),
            supply: headers.supply,
            stage: Stage::default(),
        }
    }

    /// Returns the turn of the open microbatch, or of the last one that was finished.
    pub(super) fn turn(&self) -> Turn {
        let microbatch = self.finished + usize::from(self.open.is_some());
        if self.microbatches == Some(microbatch) { Turn::Last } else { Turn::MayFollow }
    }

    /// In one sequence: issues the reductions before gather number `end`, and the gathers before them.
    fn reduce_before(&mut self, order: &Order, rules: &Rules, end: usize) -> Option<Output> {
        let turn = self.turn();
        if let Some(output) = self.reductions.all_reduce_behind(order, rules, turn) {
            return Some(output);
        }
        let before = self.reductions.gathers_before_next(order, rules, turn)?;
        if before >= end {
            return None;
        }
        let output = self.gathers.issue_next(before);
        let issued = self.gathers.issued;
        output.or_else(|| self.reductions.issue_next(order, rules, (turn, issued)))
    }

    /// Issues all reductions that are left at the end of a microbatch, in one sequence, and drops the
    /// units that are gathered before them.
    fn reduce_rest(&mut self, order: &Order, rules: &Rules) -> Option<Output> {
        let turn = self.turn();
        if let Some(output) = self.reductions.all_reduce_behind(order, rules, turn) {
            return Some(output);
        }
        let before = self.reductions.gathers_before_next(order, rules, turn)?;
        let output = self.gathers.finish_next(before);
        let issued = self.gathers.issued;
        output.or_else(|| self.reductions.issue_next(order, rules, (turn, issued)))
    }

    /// Returns the reduce-scatter whose completion lets an all-reduce begin.
    pub(super) fn watching(&self, plan: &Plan, rules: &Rules) -> Option<Operation> {
        let may_start = self.turn() == Turn::Last && reduces_once(plan) && !rules.is_one_sequence();
        self.reductions.watching(plan).filter(|_| may_start)
    }

    /// Notes that an operation is complete.
    pub(super) fn complete(&mut self, operation: Operation) {
        self.gathers.complete(operation);
        self.reductions.complete(operation);
    }
}

/// The inputs of a step.
impl StepMachine {
    /// Begins the rank's next microbatch. Collective over the world if the step has no given number of
    /// microbatches. Afterwards [`has_microbatch`](Self::has_microbatch) tells whether there is one.
    ///
    /// # Errors
    /// [`Refused::Unfinished`], [`Refused::AllDone`], [`Refused::OutOfTurn`].
    pub fn begin_microbatch(&mut self) -> Result<(), Refused> {
        let training = self.step("begin_microbatch")?;
        if training.open.is_some() {
            return Err(Refused::Unfinished { microbatch: training.finished });
        }
        match training.microbatches {
            Some(count) if count == training.finished => Err(Refused::AllDone { count }),
            None if training.may_follow => {
                self.goal = Goal::Microbatch;
                Ok(())
            }
            None => Ok(()),
            Some(_) => {
                self.open_microbatch();
                Ok(())
            }
        }
    }

    /// Returns whether a microbatch is open, or a batch of an evaluation. After
    /// [`begin_microbatch`](Self::begin_microbatch) there is none if the step ends because ranks have
    /// no more data.
    #[must_use]
    pub fn has_microbatch(&self) -> bool {
        match &self.state {
            State::Step(training) => training.open.is_some(),
            State::Evaluation(evaluation) => evaluation.is_open(),
            State::Between | State::Opening(_) => false,
        }
    }

    /// Returns the ranks with and without data, as of the last exchange about data in the step or the
    /// evaluation that is under way.
    #[must_use]
    pub fn supply(&self) -> Option<&Supply> {
        match &self.state {
            State::Step(training) => Some(&training.supply),
            State::Evaluation(evaluation) => Some(&evaluation.supply),
            State::Between | State::Opening(_) => None,
        }
    }

    /// Returns the number of microbatches that are finished in the step, or of batches in the
    /// evaluation. It is the number of the open one, too: they count from 0.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        match &self.state {
            State::Step(training) => training.finished,
            State::Evaluation(evaluation) => evaluation.batches,
            State::Between | State::Opening(_) => 0,
        }
    }

    /// Needs the parameters of a unit: the next gather of it.
    ///
    /// # Errors
    /// [`Refused::NoSuchUnit`], [`Refused::BeforeLoss`], [`Refused::NoGatherLeft`],
    /// [`Refused::OutOfOrder`], [`Refused::OutOfTurn`].
    pub fn need(&mut self, unit: UnitId) -> Result<(), Refused> {
        self.check_idle("need")?;
        self.check_unit(unit)?;
        let (spec, rules) = (self.plan.spec(), &self.rules);
        let gathers = match &mut self.state {
            State::Step(training) => {
                let open = training.open.ok_or(Refused::OutOfTurn { input: "need" })?;
                let needs_loss = rules.weights == Weights::Enter && !open.has_loss;
                if needs_loss && training.gathers.next_is_backward(unit) {
                    return Err(Refused::BeforeLoss { unit });
                }
                training.gathers.check(rules, spec, (unit, training.finished))?;
                &mut training.gathers
            }
            State::Evaluation(evaluation) => {
                evaluation.check_open("need")?;
                evaluation.gathers.check(rules, spec, (unit, evaluation.batches))?;
                &mut evaluation.gathers
            }
            State::Between | State::Opening(_) => {
                return Err(Refused::OutOfTurn { input: "need" });
            }
        };
        gathers.find(&self.orders, unit);
        self.goal = Goal::Unit { unit, place: None };
        Ok(())
    }

    /// Has the loss of the microbatch, whose forward is over.
    ///
    /// # Errors
    /// [`Refused::SecondLoss`], [`Refused::OutOfTurn`].
    pub fn loss(&mut self) -> Result<(), Refused> {
        let training = self.microbatch("loss")?;
        if training.open.is_some_and(|open| open.has_loss) {
            return Err(Refused::SecondLoss { microbatch: training.finished });
        }
        self.goal = Goal::Loss;
        Ok(())
    }

    /// Has the gradients of a unit.
    ///
    /// # Errors
    /// [`Refused::NoSuchUnit`], [`Refused::Frozen`], [`Refused::GradientsBeforeLoss`],
    /// [`Refused::Twice`], [`Refused::TooLate`], [`Refused::OutOfTurn`].
    pub fn offer(&mut self, unit: UnitId) -> Result<(), Refused> {
        self.check_unit(unit)?;
        let is_trainable = self.plan.spec()[unit].is_trainable();
        let weights = self.rules.weights;
        let training = self.microbatch("offer")?;
        if weights == Weights::Enter && !training.open.is_some_and(|open| open.has_loss) {
            return Err(Refused::GradientsBeforeLoss { unit });
        }
        if !is_trainable {
            return Err(Refused::Frozen { unit });
        }
        training.reductions.check(unit, training.finished)?;
        self.goal = Goal::Gradients { unit, are_taken: false };
        Ok(())
    }

    /// Ends the microbatch, or the batch of an evaluation.
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`] if none is open.
    pub fn end_microbatch(&mut self) -> Result<(), Refused> {
        self.check_idle("end_microbatch")?;
        match &mut self.state {
            State::Step(training) if training.open.is_some() => self.goal = Goal::EndMicrobatch,
            State::Evaluation(evaluation) => {
                evaluation.check_open("end_microbatch")?;
                self.goal = Goal::EndBatch;
            }
            _ => return Err(Refused::OutOfTurn { input: "end_microbatch" }),
        }
        Ok(())
    }

    pub(super) fn check_idle(&self, input: &'static str) -> Result<(), Refused> {
        if self.is_idle() { Ok(()) } else { Err(Refused::OutOfTurn { input }) }
    }

    fn check_unit(&self, unit: UnitId) -> Result<(), Refused> {
        let units = self.plan.spec().units().len();
        if unit.index() < units { Ok(()) } else { Err(Refused::NoSuchUnit { unit, units }) }
    }

    /// Returns the step, if one is under way and the last input is answered.
    pub(super) fn step(&mut self, input: &'static str) -> Result<&mut Training, Refused> {
        self.check_idle(input)?;
        match &mut self.state {
            State::Step(training) => Ok(training),
            _ => Err(Refused::OutOfTurn { input }),
        }
    }

    fn microbatch(&mut self, input: &'static str) -> Result<&mut Training, Refused> {
        let training = self.step(input)?;
        if training.open.is_some() { Ok(training) } else { Err(Refused::OutOfTurn { input }) }
    }

    pub(super) fn open_microbatch(&mut self) {
        if let State::Step(training) = &mut self.state {
            training.gathers.begin(&self.orders);
            training.reductions.begin_microbatch(&self.plan);
            training.open = Some(Open::default());
        }
    }
}

/// The outputs of a step.
impl StepMachine {
    /// Returns the next output to the goal.
    pub(super) fn next(&mut self) -> Option<Output> {
        let output = match self.goal {
            // An all-reduce may have become ready.
            Goal::Nothing => self.reduce_next(),
            Goal::Begin => self.begin_next(),
            Goal::Microbatch => Some(Output::Exchange(Exchange::Microbatch(Input::Ready))),
            Goal::Unit { unit, place } => self.unit_next(unit, place),
            Goal::Loss => self.loss_next(),
            Goal::Gradients { unit, are_taken } => self.gradients_next(unit, are_taken),
            Goal::EndMicrobatch => self.end_microbatch_next(),
            Goal::Finish => self.finish_next(),
            Goal::Batch => Some(Output::Exchange(Exchange::Batch(Input::Ready))),
            Goal::EndBatch => self.end_batch_next(),
            Goal::Mean => self.mean_next(),
        };
        let hands_out =
            matches!((self.goal, output), (Goal::Unit { .. }, Some(Output::Hand { .. })));
        if output.is_none() || hands_out {
            self.goal = Goal::Nothing;
        }
        output
    }

    fn unit_next(&mut self, unit: UnitId, place: Option<usize>) -> Option<Output> {
        let Self { plan, rules, orders, state, goal, .. } = self;
        let gathers = match state {
            State::Step(training) => &mut training.gathers,
            State::Evaluation(evaluation) => &mut evaluation.gathers,
            State::Between | State::Opening(_) => return None,
        };
        if let Some(output) = gathers.find_next(orders) {
            return Some(output);
        }
        let place = place.or_else(|| gathers.place_of(unit))?;
        *goal = Goal::Unit { unit, place: Some(place) };
        let end = gathers.end_of_prefetch(place, plan.options().prefetch);
        if let State::Step(training) = state {
            // In one sequence, reductions that come before these gathers.
            if let Some(output) = training.reduce_before(orders.current(), rules, end) {
                return Some(output);
            }
            return training.gathers.take_next(place, end);
        }
        match state {
            State::Evaluation(evaluation) => evaluation.gathers.take_next(place, end),
            _ => None,
        }
    }

    fn loss_next(&mut self) -> Option<Output> {
        let Self { plan, orders, state, .. } = self;
        let State::Step(training) = state else { return None };
        training.gathers.end_finding();
        let output = training.gathers.find_next(orders);
        let output = output.or_else(|| training.gathers.end_forward_next(plan.spec()));
        if output.is_some() {
            return output;
        }
        if !training.knows_weights {
            return Some(Output::Exchange(Exchange::Weights));
        }
        if let Some(open) = &mut training.open {
            open.has_loss = true;
        }
        None
    }

    fn gradients_next(&mut self, unit: UnitId, are_taken: bool) -> Option<Output> {
        let State::Step(training) = &mut self.state else { return None };
        // The order of reductions is that of the forward, which is over on this rank.
        training.gathers.end_finding();
        if let Some(output) = training.gathers.find_next(&mut self.orders) {
            return Some(output);
        }
        if !are_taken {
            self.goal = Goal::Gradients { unit, are_taken: true };
            let turn = training.turn();
            if let Some(output) = training.reductions.offer(&self.plan, turn, unit) {
                return Some(output);
            }
        }
        self.reduce_next()
    }

    /// Issues reductions whose turn has come.
    pub(super) fn reduce_next(&mut self) -> Option<Output> {
        let State::Step(training) = &mut self.state else { return None };
        training.open?;
        let (turn, issued) = (training.turn(), training.gathers.issued);
        training.reductions.next(self.orders.current(), &self.rules, (turn, issued))
    }

    pub(super) fn end_microbatch_next(&mut self) -> Option<Output> {
        let State::Step(training) = &self.state else { return None };
        let open = training.open?;
        if self.rules.weights == Weights::Enter && !open.has_loss {
            // This rank has no items: the other ranks agree with it in their `loss`.
            if let Some(output) = self.loss_next() {
                return Some(output);
            }
        }
        let Self { plan, rules, orders, state, .. } = self;
        let State::Step(training) = state else { return None };
        let turn = training.turn();
        training.gathers.end_finding();
        let output = training
            .gathers
            .find_next(orders)
            .or_else(|| training.reduce_rest(orders.current(), rules))
            .or_else(|| training.gathers.finish_next(usize::MAX));
        if output.is_some() {
            return output;
        }
        if has_reductions(plan, turn) {
            let place = (turn, training.gathers.issued);
            let output = training.reductions.issue_next(orders.current(), rules, place);
            let output = output.or_else(|| training.reductions.fold_next(plan));
            if output.is_some() {
                return output;
            }
        }
        training.open = None;
        training.finished += 1;
        None
    }

    /// Notes that the ranks know the size of weights.
    pub(super) fn take_weights(&mut self) {
        if let State::Step(training) = &mut self.state {
            training.knows_weights = true;
        }
    }

    /// Takes the conclusion from an exchange.
    pub(super) fn take_conclusion(
        &mut self,
        exchange: Exchange,
        conclusion: Conclusion,
    ) -> Result<(), Refused> {
        match (exchange, conclusion) {
            (_, Conclusion::Headers(headers)) => self.take_headers(headers),
            (Exchange::Batch(_), Conclusion::Supply(supply)) => {
                self.take_batch(supply);
                Ok(())
            }
            (_, Conclusion::Supply(supply)) => self.take_supply(supply),
            (_, Conclusion::Unit(place, next)) => {
                match &mut self.state {
                    State::Step(training) => training.gathers.take_next_unit(place, next),
                    State::Evaluation(evaluation) => evaluation.gathers.take_next_unit(place, next),
                    State::Between | State::Opening(_) => {}
                }
                Ok(())
            }
            (_, Conclusion::Overflow(limit)) => {
                if let State::Step(training) = &mut self.state {
                    training.stage = Stage::AllReducing { limit: limit.unwrap_or(usize::MAX) };
                }
                Ok(())
            }
            (exchange, Conclusion::Agreed) => self.take_agreement(exchange),
        }
    }
}
