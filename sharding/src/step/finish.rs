//! The end of a step: microbatches that only other ranks have, the all-reduces, the statement.

use super::reductions::Turn;
use super::rules::reduces_once;
use super::{
    Course, Exchange, Goal, Input, Operation, Output, Refused, State, StepMachine, Supply, Uneven,
};
use crate::Accumulation;

/// How far the end of a step is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Microbatches that only other ranks have.
    #[default]
    RunningOut,
    /// Reduce-scatters that are left. In mode `Local` they are all left, if the last microbatch was not
    /// known to be the last.
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

impl StepMachine {
    /// Ends the step. Collective over the world.
    ///
    /// # Errors
    /// [`Refused::Unfinished`], [`Refused::Missing`], [`Refused::NoData`], [`Refused::OutOfTurn`].
    pub fn finish(&mut self) -> Result<(), Refused> {
        let uneven = self.rules.uneven;
        let training = self.step("finish")?;
        let finished = training.finished;
        match (&training.open, training.microbatches) {
            (Some(_), _) => return Err(Refused::Unfinished { microbatch: finished }),
            (None, Some(count)) if finished < count && uneven != Uneven::ZeroWeight => {
                return Err(Refused::Missing { finished, count });
            }
            (None, None) if finished == 0 && !training.may_follow => {
                return Err(Refused::NoData { supply: training.supply.clone() });
            }
            _ => {}
        }
        self.goal = Goal::Finish;
        Ok(())
    }

    pub(super) fn finish_next(&mut self) -> Option<Output> {
        loop {
            let State::Step(training) = &mut self.state else { return None };
            match training.stage {
                Stage::RunningOut if training.open.is_some() => {
                    if let Some(output) = self.end_microbatch_next() {
                        return Some(output);
                    }
                }
                Stage::RunningOut => match training.microbatches {
                    Some(count) if training.finished < count => self.open_microbatch(),
                    None if training.may_follow => {
                        return Some(Output::Exchange(Exchange::Microbatch(Input::Exhausted)));
                    }
                    _ => self.begin_to_reduce(),
                },
                Stage::Reducing => {
                    let (order, rules) = (self.orders.current(), &self.rules);
                    let asks = rules.asks_for_overflow(&self.plan);
                    // Where ranks ask each other for overflows, no all-reduce begins before that.
                    let turn = if asks { Turn::MayFollow } else { Turn::Last };
                    let place = (turn, training.gathers.issued);
                    training.reductions.pass_next(&order.plan);
                    if let Some(output) = training.reductions.scatter_rest(order, rules, place) {
                        return Some(output);
                    }
                    training.stage = match asks {
                        true => Stage::Asking { awaited: 0 },
                        false => Stage::AllReducing { limit: usize::MAX },
                    };
                }
                Stage::Asking { awaited } => {
                    let is_scatter =
                        |it: &(usize, Operation)| matches!(it.1, Operation::ReduceScatter(_));
                    let plan = &self.orders.current().plan;
                    let next = training.reductions.under_way(plan, awaited).find(is_scatter);
                    let Some((place, scatter)) = next else {
                        let all_reduces = training.reductions.all_reduced();
                        return Some(Output::Exchange(Exchange::Interim { all_reduces }));
                    };
                    training.stage = Stage::Asking { awaited: place + 1 };
                    return Some(Output::Await(scatter));
                }
                Stage::AllReducing { limit } => {
                    let plan = &self.orders.current().plan;
                    let limit = if reduces_once(plan) { limit } else { 0 };
                    if let Some(output) = training.reductions.all_reduce_next(plan, limit) {
                        return Some(output);
                    }
                    training.stage = Stage::Awaiting { awaited: 0 };
                }
                Stage::Awaiting { awaited } => {
                    let plan = &self.orders.current().plan;
                    let next = training.reductions.under_way(plan, awaited).next();
                    if let Some((place, operation)) = next {
                        training.stage = Stage::Awaiting { awaited: place + 1 };
                        return Some(Output::Await(operation));
                    }
                    training.stage = Stage::Stating;
                }
                Stage::Stating => return Some(Output::Exchange(Exchange::Statement)),
            }
        }
    }

    fn begin_to_reduce(&mut self) {
        let State::Step(training) = &mut self.state else { return };
        let is_local = self.plan.options().accumulation == Accumulation::Local;
        if is_local && training.turn() == Turn::MayFollow {
            training.reductions.begin_microbatch(&self.plan);
        }
        training.stage = Stage::Reducing;
    }

    /// Takes the ranks that have another microbatch.
    pub(super) fn take_supply(&mut self, supply: Supply) -> Result<(), Refused> {
        let State::Step(training) = &mut self.state else { return Ok(()) };
        let course = supply.course(self.rules.uneven);
        training.supply = supply;
        let is_finishing = self.goal == Goal::Finish;
        match course {
            Some(Course::Goes) => self.open_microbatch(),
            Some(Course::Ends) => {
                training.may_follow = false;
                if is_finishing && training.finished == 0 {
                    return Err(Refused::NoData { supply: training.supply.clone() });
                }
            }
            None => {
                let (microbatch, supply) = (Some(training.finished), training.supply.clone());
                return Err(Refused::UnevenInputs { microbatch, supply });
            }
        }
        if !is_finishing {
            self.goal = Goal::Nothing;
        }
        Ok(())
    }

    /// Notes the agreement of all ranks.
    pub(super) fn take_agreement(&mut self, exchange: Exchange) -> Result<(), Refused> {
        match exchange {
            Exchange::Weights => self.take_weights(),
            Exchange::Statement => {
                self.orders.settle();
                (self.state, self.goal) = (State::Between, Goal::Nothing);
            }
            Exchange::Mean => self.goal = Goal::Nothing,
            _ => return self.take_comparison(exchange),
        }
        Ok(())
    }
}
