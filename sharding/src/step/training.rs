//! A step: its opening, its microbatches one after the other, and its end.

use super::exchange::{Conclusion, Exchange, Headers};
use super::gathers::GatherQueue;
use super::inputs::{Begin, Goal, Intent, Refused};
use super::order::PlanOrders;
use super::output::{Operation, Output};
use super::reductions::{DueConditions, MicrobatchTurn, ReductionQueue, has_reductions};
use super::rules::{Course, Input, MicrobatchWeights, Supply, Uneven, reduces_once};
use crate::{Accumulation, Phase, UnitId};

/// A step that begins, or the end of a run.
#[derive(Debug)]
pub(super) struct StepOpening {
    begin: Begin,
    headers: Headers,
    stage: OpeningStage,
}

/// The next exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpeningStage {
    Headers,
    Samples,
    Replicas,
}

impl StepOpening {
    pub(super) fn new(begin: Begin) -> Self {
        Self { begin, headers: Headers::default(), stage: OpeningStage::Headers }
    }

    /// Returns whether the next exchange compares shards of replicas, which are whole then.
    pub(super) fn compares_replicas(&self) -> bool {
        self.stage == OpeningStage::Replicas
    }

    /// Returns the next exchange.
    pub(super) fn next(&self) -> Output {
        Output::Exchange(match self.stage {
            OpeningStage::Headers => Exchange::Headers,
            OpeningStage::Samples => Exchange::Samples,
            OpeningStage::Replicas => Exchange::Replicas,
        })
    }

    /// Takes the conclusion from an exchange. Returns whether the step begins; `None` if another
    /// exchange follows.
    pub(super) fn conclude(
        &mut self,
        conclusion: Conclusion,
        orders: &mut PlanOrders,
    ) -> Result<Option<Course>, Refused> {
        if let Conclusion::Headers(headers) = conclusion {
            self.headers = headers;
            if self.headers.names_samples {
                self.stage = OpeningStage::Samples;
                return Ok(None);
            }
        }
        if self.stage == OpeningStage::Replicas {
            return Ok(Some(Course::Goes));
        }
        let Headers { supply, ending, .. } = &self.headers;
        match supply.course(orders.rules.uneven) {
            Some(Course::Ends) => Ok(Some(Course::Ends)),
            // A rank that ends its run takes no part in steps of other ranks, not even without
            // data.
            _ if !ending.is_empty() => {
                Err(Refused::UnevenEnds { ending: ending.clone(), ready: supply.ready.clone() })
            }
            Some(Course::Goes) => {
                if self.headers.gathers_again {
                    orders.gather_again();
                }
                if orders.rules.compares_replicas(self.begin.step) {
                    self.stage = OpeningStage::Replicas;
                    return Ok(None);
                }
                Ok(Some(Course::Goes))
            }
            None => Err(Refused::UnevenInputs { microbatch: None, supply: supply.clone() }),
        }
    }

    /// Returns the step that begins; `None` at the end of the run.
    pub(super) fn step(&mut self, orders: &PlanOrders) -> Option<StepCourse> {
        let Intent::Step { microbatches, .. } = self.begin.intent else { return None };
        Some(StepCourse {
            microbatches,
            may_follow: true,
            finished: 0,
            open: None,
            knows_weights: orders.rules.weights == MicrobatchWeights::Ignored
                || self.headers.weight_hint > 0,
            gathers: GatherQueue::of_step(),
            reductions: ReductionQueue::new(&orders.declared().plan),
            supply: std::mem::take(&mut self.headers.supply),
            stage: FinishStage::RunningOut,
        })
    }
}

/// A step that is under way.
#[derive(Debug)]
pub(super) struct StepCourse {
    /// Number of microbatches, if it was given.
    microbatches: Option<usize>,
    /// Whether another microbatch may follow, where no number was given.
    may_follow: bool,
    /// Microbatches finished so far.
    pub(super) finished: usize,
    open: Option<OpenMicrobatch>,
    /// Whether the ranks know the size of weights, so far as they need it.
    knows_weights: bool,
    pub(super) gathers: GatherQueue,
    reductions: ReductionQueue,
    /// The ranks with and without data, as of the last question.
    pub(super) supply: Supply,
    stage: FinishStage,
}

/// A microbatch that is under way.
#[derive(Clone, Copy, Debug, Default)]
struct OpenMicrobatch {
    has_loss: bool,
}

/// How far the end of a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FinishStage {
    /// Microbatches that only other ranks have.
    RunningOut,
    /// Reduce-scatters that are left. In mode `Local` they are all left, if the last microbatch was
    /// not known to be the last.
    Reducing,
    /// The exchange about overflows, when the reduce-scatters before it are complete.
    Asking {
        /// Number of first reductions that were awaited.
        awaited: usize,
    },
    /// The all-reduces that are left, up to a number.
    AllReducing {
        /// Number of all-reduces that all ranks issue.
        limit: usize,
    },
    /// Waits for all that is under way.
    Awaiting {
        /// Number of first reductions that were awaited.
        awaited: usize,
    },
    /// The exchange of statements.
    Stating,
}

/// The inputs of a step. Each returns the goal of its answer.
impl StepCourse {
    pub(super) fn begin_microbatch(&mut self, orders: &PlanOrders) -> Result<Goal, Refused> {
        if self.open.is_some() {
            return Err(Refused::Unfinished { microbatch: self.finished });
        }
        match self.microbatches {
            Some(count) if count == self.finished => return Err(Refused::AllDone { count }),
            None if self.may_follow => return Ok(Goal::Microbatch),
            None => {}
            Some(_) => self.open_microbatch(orders),
        }
        Ok(Goal::Nothing)
    }

    pub(super) fn need(&mut self, unit: UnitId, orders: &PlanOrders) -> Result<Goal, Refused> {
        let open = self.microbatch("need")?;
        let needs_loss = orders.rules.weights == MicrobatchWeights::Enter && !open.has_loss;
        if needs_loss && self.gathers.next_is_backward(unit) {
            return Err(Refused::BeforeLoss { unit });
        }
        self.gathers.check(orders, unit, self.finished)?;
        self.gathers.find(orders, unit);
        Ok(Goal::Unit(unit))
    }

    pub(super) fn statistics(
        &self,
        unit: UnitId,
        index: usize,
        phase: Phase,
        orders: &PlanOrders,
    ) -> Result<Goal, Refused> {
        let open = self.microbatch("statistics")?;
        let needs_loss = orders.rules.weights == MicrobatchWeights::Enter && !open.has_loss;
        if needs_loss && phase == Phase::Backward {
            return Err(Refused::OutOfTurn { input: "statistics" });
        }
        self.gathers.check_statistics(orders, unit, index, phase, self.finished)?;
        Ok(Goal::Statistics { unit, index, phase })
    }

    pub(super) fn loss(&self) -> Result<Goal, Refused> {
        if self.microbatch("loss")?.has_loss {
            return Err(Refused::SecondLoss { microbatch: self.finished });
        }
        Ok(Goal::Loss)
    }

    pub(super) fn offer(&self, unit: UnitId, orders: &PlanOrders) -> Result<Goal, Refused> {
        let open = self.microbatch("offer")?;
        if orders.rules.weights == MicrobatchWeights::Enter && !open.has_loss {
            return Err(Refused::GradientsBeforeLoss { unit });
        }
        if !orders.declared().plan.spec()[unit].is_trainable() {
            return Err(Refused::Frozen { unit });
        }
        self.reductions.check(unit, self.finished)?;
        Ok(Goal::Gradients(unit))
    }

    pub(super) fn end_microbatch(&self) -> Result<Goal, Refused> {
        self.microbatch("end_microbatch").map(|_| Goal::EndMicrobatch)
    }

    pub(super) fn finish(&self, orders: &PlanOrders) -> Result<Goal, Refused> {
        let finished = self.finished;
        match (self.open, self.microbatches) {
            (Some(_), _) => Err(Refused::Unfinished { microbatch: finished }),
            (None, Some(count))
                if finished < count && orders.rules.uneven != Uneven::ZeroWeight =>
            {
                Err(Refused::Missing { finished, count })
            }
            (None, None) if finished == 0 && !self.may_follow => {
                Err(Refused::NoData { supply: self.supply.clone() })
            }
            _ => Ok(Goal::Finish),
        }
    }

    fn microbatch(&self, input: &'static str) -> Result<OpenMicrobatch, Refused> {
        self.open.ok_or(Refused::OutOfTurn { input })
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    fn open_microbatch(&mut self, orders: &PlanOrders) {
        self.gathers.begin(orders);
        self.reductions.begin_microbatch(&orders.declared().plan);
        self.open = Some(OpenMicrobatch::default());
    }

    /// Returns the facts on which reductions depend in the open microbatch, or in the last one that
    /// was finished.
    fn due<'a>(&self, orders: &'a PlanOrders) -> DueConditions<'a> {
        let microbatch = self.finished + usize::from(self.open.is_some());
        let turn = match self.microbatches == Some(microbatch) {
            true => MicrobatchTurn::Last,
            false => MicrobatchTurn::MayFollow,
        };
        DueConditions {
            order: orders.current(),
            rules: &orders.rules,
            turn,
            gathers: self.gathers.issued,
        }
    }

    /// Returns the operation whose completion lets another one begin: a reduce-scatter, or a gather
    /// of slices.
    pub(super) fn watching(&self, orders: &PlanOrders) -> Option<Operation> {
        let watched = self.reductions.watching(self.due(orders));
        watched.or_else(|| self.gathers.watching(orders))
    }

    /// Notes that an operation is complete.
    pub(super) fn complete(&mut self, operation: Operation) {
        self.gathers.complete(operation);
        self.reductions.complete(operation);
    }

    /// Takes the conclusion from an exchange before the statements.
    pub(super) fn conclude(
        &mut self,
        conclusion: Conclusion,
        goal: Goal,
        orders: &PlanOrders,
    ) -> Result<(), Refused> {
        match conclusion {
            Conclusion::Supply(supply) => {
                let course = supply.course(orders.rules.uneven);
                self.supply = supply;
                return self.take_course(course, goal, orders);
            }
            Conclusion::Unit(place, next) => self.gathers.take_next_unit(place, next),
            Conclusion::Overflow(limit) => {
                self.stage = FinishStage::AllReducing { limit: limit.unwrap_or(usize::MAX) };
            }
            Conclusion::Headers(_) | Conclusion::Batches(_) | Conclusion::Agreed => {
                self.knows_weights = true;
            }
        }
        Ok(())
    }

    fn take_course(
        &mut self,
        course: Option<Course>,
        goal: Goal,
        orders: &PlanOrders,
    ) -> Result<(), Refused> {
        let supply = &self.supply;
        match course {
            Some(Course::Goes) => self.open_microbatch(orders),
            Some(Course::Ends) => {
                self.may_follow = false;
                if goal == Goal::Finish && self.finished == 0 {
                    return Err(Refused::NoData { supply: supply.clone() });
                }
            }
            None => {
                let microbatch = Some(self.finished);
                return Err(Refused::UnevenInputs { microbatch, supply: supply.clone() });
            }
        }
        Ok(())
    }
}

/// The outputs of a step.
impl StepCourse {
    /// Returns the next output to the goal; `None` if it is answered.
    pub(super) fn next(&mut self, goal: Goal, orders: &mut PlanOrders) -> Option<Output> {
        match goal {
            Goal::Begin | Goal::Slices(_) | Goal::WholeShards => None,
            // A reduction over the replicas may have become ready, or a gather ahead.
            Goal::Nothing => {
                self.reduce_next(orders).or_else(|| self.gathers.prefetch_next(orders))
            }
            Goal::Microbatch => Some(Output::Exchange(Exchange::Microbatch(Input::Ready))),
            Goal::Unit(unit) => self.unit_next(unit, orders),
            Goal::Statistics { unit, index, phase } => {
                self.statistics_next(unit, index, phase, orders)
            }
            Goal::Loss => self.loss_next(orders),
            Goal::Gradients(unit) => self.gradients_next(unit, orders),
            Goal::EndMicrobatch => self.end_microbatch_next(orders),
            Goal::Finish => self.finish_next(orders),
        }
    }

    fn unit_next(&mut self, unit: UnitId, orders: &mut PlanOrders) -> Option<Output> {
        if let Some(output) = self.gathers.find_next(orders) {
            return Some(output);
        }
        let place = self.gathers.place_of(unit)?;
        // The program is done with the units before it: in the backward, with those behind it.
        if let Some(output) = self.gathers.statistics_before_next(orders, place) {
            return Some(output);
        }
        let end = self.gathers.end_of_prefetch(place, orders.declared().plan.options().prefetch);
        // In one sequence, reductions that come before these gathers.
        let due = self.due(orders);
        self.reduce_before(orders, due, end).or_else(|| self.gathers.take_next(orders, place, end))
    }

    fn statistics_next(
        &mut self,
        unit: UnitId,
        index: usize,
        phase: Phase,
        orders: &mut PlanOrders,
    ) -> Option<Output> {
        if phase == Phase::Backward {
            // Their order is that of the forward, which is over on this rank.
            self.gathers.end_finding();
            if let Some(output) = self.gathers.find_next(orders) {
                return Some(output);
            }
            // Other ranks come to them behind these gathers.
            let end = self.gathers.end_before_statistics(unit);
            let due = self.due(orders);
            let output = self
                .reduce_before(orders, due, end)
                .or_else(|| self.gathers.issue_next(orders, end));
            if output.is_some() {
                return output;
            }
        }
        self.gathers.statistics_next(orders, unit, index, phase)
    }

    fn loss_next(&mut self, orders: &mut PlanOrders) -> Option<Output> {
        self.gathers.end_finding();
        let output = self.gathers.find_next(orders);
        let output = output.or_else(|| self.gathers.end_forward_next(orders));
        if output.is_some() {
            return output;
        }
        if !self.knows_weights {
            return Some(Output::Exchange(Exchange::Weights));
        }
        if let Some(open) = &mut self.open {
            open.has_loss = true;
        }
        None
    }

    fn gradients_next(&mut self, unit: UnitId, orders: &mut PlanOrders) -> Option<Output> {
        // The order of reductions is that of the forward, which is over on this rank.
        self.gathers.end_finding();
        if let Some(output) = self.gathers.find_next(orders) {
            return Some(output);
        }
        if self.reductions.wants(unit) {
            let due = self.due(orders);
            if let Some(output) = self.reductions.offer(&due.order.plan, due.turn, unit) {
                return Some(output);
            }
        }
        self.reduce_next(orders)
    }

    /// Issues reductions whose turn has come.
    fn reduce_next(&mut self, orders: &PlanOrders) -> Option<Output> {
        self.open?;
        self.reductions.next(self.due(orders))
    }

    /// In one sequence: issues the reductions before gather number `end`, and the gathers before
    /// them.
    fn reduce_before(
        &mut self,
        orders: &PlanOrders,
        due: DueConditions<'_>,
        end: usize,
    ) -> Option<Output> {
        if let Some(output) = self.reductions.all_reduce_behind(due) {
            return Some(output);
        }
        let before = self.reductions.gathers_before_next(due).filter(|before| *before < end)?;
        self.gathers.issue_next(orders, before).or_else(|| self.reductions.issue_next(due))
    }

    /// Issues all reductions that are left at the end of a microbatch, in one sequence, and drops
    /// the units that are gathered before them.
    fn reduce_rest(&mut self, due: DueConditions<'_>, orders: &PlanOrders) -> Option<Output> {
        if let Some(output) = self.reductions.all_reduce_behind(due) {
            return Some(output);
        }
        let before = self.reductions.gathers_before_next(due)?;
        self.gathers.finish_next(orders, before).or_else(|| self.reductions.issue_next(due))
    }

    fn end_microbatch_next(&mut self, orders: &mut PlanOrders) -> Option<Output> {
        if orders.rules.weights == MicrobatchWeights::Enter && !self.open?.has_loss {
            // This rank has no items: the other ranks agree with it in their `loss`.
            if let Some(output) = self.loss_next(orders) {
                return Some(output);
            }
        }
        self.gathers.end_finding();
        if let Some(output) = self.gathers.find_next(orders) {
            return Some(output);
        }
        let due = self.due(orders);
        let output = self.reduce_rest(due, orders);
        let output = output.or_else(|| self.gathers.finish_next(orders, usize::MAX));
        let output = output.or_else(|| self.gathers.end_statistics_next(orders));
        if output.is_some() {
            return output;
        }
        let plan = &orders.declared().plan;
        if has_reductions(plan, due.turn) {
            let output = self.reductions.issue_next(due);
            let output = output.or_else(|| self.reductions.fold_next(plan));
            if output.is_some() {
                return output;
            }
        }
        self.open = None;
        self.finished += 1;
        None
    }

    fn finish_next(&mut self, orders: &mut PlanOrders) -> Option<Output> {
        loop {
            match self.stage {
                FinishStage::RunningOut if self.open.is_some() => {
                    if let Some(output) = self.end_microbatch_next(orders) {
                        return Some(output);
                    }
                }
                FinishStage::RunningOut => match self.microbatches {
                    Some(count) if self.finished < count => self.open_microbatch(orders),
                    None if self.may_follow => {
                        return Some(Output::Exchange(Exchange::Microbatch(Input::Exhausted)));
                    }
                    _ => self.begin_to_reduce(self.due(orders)),
                },
                FinishStage::Reducing => {
                    let plan = &orders.current().plan;
                    let asks = orders.rules.asks_for_overflow(plan);
                    // Where ranks ask each other for overflows, no all-reduce begins before that.
                    let turn = if asks { MicrobatchTurn::MayFollow } else { MicrobatchTurn::Last };
                    let due = DueConditions { turn, ..self.due(orders) };
                    self.reductions.pass_next(plan);
                    if let Some(output) = self.reductions.scatter_rest(due) {
                        return Some(output);
                    }
                    self.stage = match asks {
                        true => FinishStage::Asking { awaited: 0 },
                        false => FinishStage::AllReducing { limit: usize::MAX },
                    };
                }
                FinishStage::Asking { awaited } => {
                    let is_scatter =
                        |it: &(usize, Operation)| matches!(it.1, Operation::ReduceScatter(_));
                    let plan = &orders.current().plan;
                    let next = self.reductions.under_way(plan, awaited).find(is_scatter);
                    let Some((place, scatter)) = next else {
                        let all_reduces = self.reductions.all_reduced;
                        return Some(Output::Exchange(Exchange::Interim { all_reduces }));
                    };
                    self.stage = FinishStage::Asking { awaited: place + 1 };
                    return Some(Output::Await(scatter));
                }
                FinishStage::AllReducing { limit } => {
                    let plan = &orders.current().plan;
                    let limit = if reduces_once(plan) { limit } else { 0 };
                    if let Some(output) = self.reductions.all_reduce_next(plan, limit) {
                        return Some(output);
                    }
                    self.stage = FinishStage::Awaiting { awaited: 0 };
                }
                FinishStage::Awaiting { awaited } => {
                    let plan = &orders.current().plan;
                    let next = self.reductions.under_way(plan, awaited).next();
                    if let Some((place, operation)) = next {
                        self.stage = FinishStage::Awaiting { awaited: place + 1 };
                        return Some(Output::Await(operation));
                    }
                    self.stage = FinishStage::Stating;
                }
                FinishStage::Stating => return Some(Output::Exchange(Exchange::Statement)),
            }
        }
    }

    fn begin_to_reduce(&mut self, due: DueConditions<'_>) {
        let plan = &due.order.plan;
        let is_local = plan.options().accumulation == Accumulation::Local;
        if is_local && due.turn == MicrobatchTurn::MayFollow {
            self.reductions.begin_microbatch(plan);
        }
        self.stage = FinishStage::Reducing;
    }
}
