//! The reductions of one step: a reduce-scatter of each unit in each microbatch, and an all-reduce.
//!
//! Gradients may be offered in any order. Reductions are issued in the reverse order of the units,
//! which is equal on all ranks. A unit that a rank does not offer is reduced with zeros.

use super::inputs::Refused;
use super::order::PlanOrder;
use super::output::{Operation, Output, Source, Target};
use super::rules::{ReductionTime, Rules, reduces_every_microbatch, reduces_once};
use crate::{Accumulation, Plan, UnitId};

/// Whether another microbatch follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MicrobatchTurn {
    /// It does, or it is not known.
    MayFollow,
    /// None follows, so that all-reduces may start.
    Last,
}

/// Facts on which it depends whether a reduction is due.
#[derive(Clone, Copy, Debug)]
pub(super) struct DueConditions<'a> {
    pub(super) order: &'a PlanOrder,
    pub(super) rules: &'a Rules,
    pub(super) turn: MicrobatchTurn,
    /// Number of gathers that were issued.
    pub(super) gathers: usize,
}

impl DueConditions<'_> {
    /// Returns whether all-reduces may start.
    fn has_all_reduces(&self) -> bool {
        self.turn == MicrobatchTurn::Last && reduces_once(&self.order.plan)
    }
}

/// State of a unit's gradients in a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offer {
    /// They were not offered.
    Nothing,
    /// They wait for their turn.
    Waiting(Source),
    /// Zeros, or what was accumulated before, wait in their place.
    Passed(Source),
    /// They were issued, or wait unsharded for the last microbatch.
    Taken,
    /// Zeros were issued in their place.
    Missed,
}

/// The sums of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SumsState {
    /// No gradient has come to them in this step.
    Empty,
    /// No collective uses them.
    Held,
    /// A reduce-scatter adds to them.
    Scattering,
    /// Their all-reduce is under way, or their reduce-scatter over the replicas.
    AllReducing,
}

/// The reductions of one step.
#[derive(Debug)]
pub(super) struct ReductionQueue {
    /// State of the gradients, by unit.
    offers: Vec<Offer>,
    /// State of the sums, by unit.
    sums: Vec<SumsState>,
    /// Number of reductions that were issued in this microbatch.
    scattered: usize,
    /// Number of all-reduces that were issued: in the step, or in mode `Every` in the microbatch.
    pub(super) all_reduced: usize,
    /// Mode `Every`: number of units whose sums of the microbatch were added to their partials.
    folded: usize,
}

impl ReductionQueue {
    pub(super) fn new(plan: &Plan) -> Self {
        let units = plan.spec().units().len();
        Self {
            offers: vec![Offer::Nothing; units],
            sums: vec![SumsState::Empty; units],
            scattered: 0,
            all_reduced: 0,
            folded: 0,
        }
    }

    pub(super) fn begin_microbatch(&mut self, plan: &Plan) {
        self.offers.fill(Offer::Nothing);
        self.scattered = 0;
        self.folded = 0;
        if reduces_every_microbatch(plan) {
            self.all_reduced = 0;
        }
    }

    /// Checks that gradients of `unit` may be offered.
    pub(super) fn check(&self, unit: UnitId, microbatch: usize) -> Result<(), Refused> {
        match self.offers[unit.index()] {
            Offer::Nothing => Ok(()),
            Offer::Missed => Err(Refused::TooLate { unit, microbatch }),
            Offer::Waiting(_) | Offer::Passed(_) | Offer::Taken => {
                Err(Refused::Twice { unit, microbatch })
            }
        }
    }

    /// Returns whether the unit was not offered, and no zeros were reduced in its place.
    pub(super) fn wants(&self, unit: UnitId) -> bool {
        self.offers[unit.index()] == Offer::Nothing
    }

    /// Takes the gradients of a unit. Mode `Local` accumulates them.
    pub(super) fn offer(
        &mut self,
        plan: &Plan,
        turn: MicrobatchTurn,
        unit: UnitId,
    ) -> Option<Output> {
        let is_local = plan.options().accumulation == Accumulation::Local;
        self.offers[unit.index()] = match (is_local, turn) {
            (false, _) => Offer::Waiting(Source::Offered),
            (true, MicrobatchTurn::Last) => Offer::Waiting(Source::Accumulated),
            (true, MicrobatchTurn::MayFollow) => Offer::Taken,
        };
        is_local.then_some(Output::Accumulate(unit))
    }

    /// Lets the next unit be reduced without gradients of this microbatch, if none were offered.
    pub(super) fn pass_next(&mut self, plan: &Plan) {
        let Some(unit) = plan.reductions().get(self.scattered) else { return };
        let offer = &mut self.offers[unit.index()];
        if *offer == Offer::Nothing {
            *offer = Offer::Passed(nothing(plan));
        }
    }

    /// Returns the number of gathers before the next reduction of this microbatch, where they are
    /// one sequence; `None` behind the last one.
    pub(super) fn gathers_before_next(&self, due: DueConditions<'_>) -> Option<usize> {
        let DueConditions { order, rules, .. } = due;
        if !rules.is_one_sequence() || !has_reductions(&order.plan, due.turn) {
            return None;
        }
        let before = order.gathers_before(self.scattered)?;
        Some(match rules.reductions {
            ReductionTime::InTurn => before,
            ReductionTime::AtTheEnd => order.plan.gathers().len(),
        })
    }

    /// Issues the next reduction, whose place among gathers has come, without gradients of this
    /// microbatch if none were offered.
    pub(super) fn issue_next(&mut self, due: DueConditions<'_>) -> Option<Output> {
        self.pass_next(&due.order.plan);
        self.next(due)
    }

    /// Issues the reductions that are next, as far as their gradients were offered.
    pub(super) fn next(&mut self, due: DueConditions<'_>) -> Option<Output> {
        self.scatter_rest(due).or_else(|| self.all_reduce_if_complete(due))
    }

    /// Issues the reduce-scatters that are next, with the all-reduces that go between them in one
    /// sequence.
    pub(super) fn scatter_rest(&mut self, due: DueConditions<'_>) -> Option<Output> {
        self.all_reduce_behind(due).or_else(|| self.scatter_next(due))
    }

    /// In one sequence: issues the all-reduce of each unit behind the reduce-scatter of the next
    /// one.
    pub(super) fn all_reduce_behind(&mut self, due: DueConditions<'_>) -> Option<Output> {
        let may_start = due.has_all_reduces() && due.rules.is_one_sequence();
        if !may_start || self.all_reduced + 1 >= self.scattered {
            return None;
        }
        self.all_reduce_next(&due.order.plan, usize::MAX)
    }

    fn scatter_next(&mut self, due: DueConditions<'_>) -> Option<Output> {
        let plan = &*due.order.plan;
        let unit = *plan.reductions().get(self.scattered)?;
        if self.gathers_before_next(due).is_some_and(|before| before > due.gathers) {
            return None;
        }
        let (from, then) = match self.offers[unit.index()] {
            Offer::Waiting(from) => (from, Offer::Taken),
            Offer::Passed(from) => (from, Offer::Missed),
            Offer::Nothing | Offer::Taken | Offer::Missed => return None,
        };
        let into = match self.sums[unit.index()] {
            _ if reduces_every_microbatch(plan) => Target::Microbatch,
            SumsState::Empty => Target::NewPartial,
            SumsState::Held => Target::Partial,
            SumsState::Scattering | SumsState::AllReducing => {
                return Some(Output::Follow(Operation::ReduceScatter(unit)));
            }
        };
        self.offers[unit.index()] = then;
        self.sums[unit.index()] = SumsState::Scattering;
        self.scattered += 1;
        Some(Output::ReduceScatter { unit, from, into })
    }

    /// Issues the next all-reduce, behind its reduce-scatter, if fewer than `limit` were issued.
    pub(super) fn all_reduce_next(&mut self, plan: &Plan, limit: usize) -> Option<Output> {
        if self.all_reduced >= limit.min(plan.reductions().len()) {
            return None;
        }
        let unit = plan.reductions()[self.all_reduced];
        if self.sums[unit.index()] == SumsState::Scattering {
            return Some(Output::Follow(Operation::ReduceScatter(unit)));
        }
        self.sums[unit.index()] = SumsState::AllReducing;
        self.all_reduced += 1;
        Some(match plan.divides_state() {
            true => Output::ScatterSums(unit),
            false => Output::AllReduce(unit),
        })
    }

    /// In a sequence of each channel: issues the next all-reduce, if its reduce-scatter is
    /// complete.
    fn all_reduce_if_complete(&mut self, due: DueConditions<'_>) -> Option<Output> {
        if !due.has_all_reduces() || due.rules.is_one_sequence() {
            return None;
        }
        let plan = &due.order.plan;
        let unit = self.next_all_reduced(plan)?;
        match self.sums[unit.index()] {
            SumsState::Held => self.all_reduce_next(plan, usize::MAX),
            SumsState::Empty | SumsState::Scattering | SumsState::AllReducing => None,
        }
    }

    /// Returns the reduce-scatter whose completion lets the next all-reduce begin.
    pub(super) fn watching(&self, due: DueConditions<'_>) -> Option<Operation> {
        let unit = self.next_all_reduced(&due.order.plan)?;
        let is_watched = self.sums[unit.index()] == SumsState::Scattering
            && due.has_all_reduces()
            && !due.rules.is_one_sequence();
        is_watched.then_some(Operation::ReduceScatter(unit))
    }

    fn next_all_reduced(&self, plan: &Plan) -> Option<UnitId> {
        plan.reductions()
            .get(self.all_reduced)
            .copied()
            .filter(|_| self.all_reduced < self.scattered)
    }

    /// Mode `Every` with replicas, at the end of a microbatch: all-reduces its sums, and adds them
    /// to the partials.
    ///
    /// All gathers of the microbatch are done then. An earlier wait for a reduction could be a wait
    /// for a rank that waits for one of this rank's gathers.
    pub(super) fn fold_next(&mut self, plan: &Plan) -> Option<Output> {
        if !reduces_every_microbatch(plan) {
            return None;
        }
        if let Some(output) = self.all_reduce_next(plan, usize::MAX) {
            return Some(output);
        }
        let unit = *plan.reductions().get(self.folded)?;
        if self.sums[unit.index()] == SumsState::AllReducing {
            return Some(Output::Await(over_replicas(plan, unit)));
        }
        self.folded += 1;
        Some(Output::Fold(unit))
    }

    /// Returns the operations that are under way, each with its place in the plan's order, from
    /// place `from` on.
    pub(super) fn under_way(
        &self,
        plan: &Plan,
        from: usize,
    ) -> impl Iterator<Item = (usize, Operation)> {
        let reductions = plan.reductions().iter().enumerate().skip(from);
        reductions.filter_map(|(place, unit)| match self.sums[unit.index()] {
            SumsState::Scattering => Some((place, Operation::ReduceScatter(*unit))),
            SumsState::AllReducing => Some((place, over_replicas(plan, *unit))),
            SumsState::Empty | SumsState::Held => None,
        })
    }

    /// Notes that an operation is complete.
    pub(super) fn complete(&mut self, operation: Operation) {
        let (Operation::ReduceScatter(unit)
        | Operation::AllReduce(unit)
        | Operation::ScatterSums(unit)) = operation
        else {
            return;
        };
        self.sums[unit.index()] = SumsState::Held;
    }
}

/// Returns the operation by which a unit's sums are reduced over the replicas.
fn over_replicas(plan: &Plan, unit: UnitId) -> Operation {
    match plan.divides_state() {
        true => Operation::ScatterSums(unit),
        false => Operation::AllReduce(unit),
    }
}

/// Returns whether reductions take place in a microbatch.
pub(super) fn has_reductions(plan: &Plan, turn: MicrobatchTurn) -> bool {
    plan.options().accumulation != Accumulation::Local || turn == MicrobatchTurn::Last
}

/// Returns the source that stands for gradients that were not offered.
fn nothing(plan: &Plan) -> Source {
    match plan.options().accumulation {
        Accumulation::Local => Source::Accumulated,
        Accumulation::ReduceScatter | Accumulation::Every => Source::Zeros,
    }
}
