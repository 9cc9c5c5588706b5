//! A microbatch: forward, backward, and reductions as gradients come.

use hsdp_flight::Stage;
use hsdp_sharding::{Accumulation, AfterForward, UnitId};

use super::gathers::Gathers;
use super::writer::{MICROBATCH_HEADER, Writer};
use super::{Action, Block, Data, Microbatches, Reference, Work};

/// Whether a microbatch is known to be the last one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    MayFollow,
    Last,
}

impl Writer<'_> {
    /// A microbatch that is not known to be the last one, so many times.
    pub(super) fn repeated(mut self, times: u64) -> Block {
        if matches!(self.step.microbatches, Microbatches::Asked(_)) {
            self.exchange(Stage::Header, MICROBATCH_HEADER);
        }
        self.microbatch(Turn::MayFollow);
        self.block.times = times;
        self.end()
    }

    /// The last microbatch, and the end of the step.
    pub(super) fn last(mut self) -> Block {
        self.microbatch(Turn::Last);
        let scatters = self.block.scatters.iter().copied().map(Reference::Here).collect();
        self.end_of_step(scatters);
        self.end()
    }

    fn microbatch(&mut self, turn: Turn) {
        match self.step.data {
            Data::Present => self.with_data(turn),
            Data::Absent => self.without_data(turn),
        }
        if self.reduces_every_microbatch() {
            self.all_reduce_and_fold();
        }
    }

    fn with_data(&mut self, turn: Turn) {
        let mut gathers = Gathers::new(self);
        let plan = self.plan;
        for (place, unit) in plan.order().iter().enumerate() {
            self.unshard(&mut gathers, place);
            self.compute(Work::Forward(*unit));
        }
        // `Pass::loss` takes a number: the host reads it.
        self.compute(Work::Loss);
        self.act(Action::Read);
        let has_backward =
            |unit: &&UnitId| plan.spec()[**unit].after_forward != AfterForward::Discard;
        for unit in plan.order().iter().rev().filter(has_backward) {
            self.unshard_again(&mut gathers, *unit);
            self.compute(Work::Backward(*unit));
            if plan.spec()[*unit].is_trainable() {
                self.reduce(turn, *unit);
            }
        }
    }

    /// A unit's gradients: they are accumulated, or reduced.
    fn reduce(&mut self, turn: Turn, unit: UnitId) {
        if self.plan.options().accumulation == Accumulation::Local {
            self.compute(Work::Accumulate(unit));
        }
        if self.has_reductions(turn) {
            self.scatter(turn, unit);
            self.issue_ready(turn);
        }
    }

    /// A rank without data makes all gathers, one after the other, and reduces zeros.
    fn without_data(&mut self, turn: Turn) {
        let mut gathers = Gathers::new(self);
        self.end_forward(&mut gathers);
        let plan = self.plan;
        let reductions = if self.has_reductions(turn) { plan.reductions() } else { &[] };
        if self.is_on_device() {
            for (unit, before) in reductions.iter().zip(plan.gathers_before_reductions()) {
                self.finish_gathers(&mut gathers, before);
                self.scatter(turn, *unit);
            }
            self.finish_gathers(&mut gathers, plan.gathers().len());
        } else {
            self.finish_gathers(&mut gathers, plan.gathers().len());
            reductions.iter().for_each(|unit| self.scatter(turn, *unit));
            self.issue_ready(turn);
        }
    }

    /// Whether reductions take place in a microbatch.
    fn has_reductions(&self, turn: Turn) -> bool {
        self.plan.options().accumulation != Accumulation::Local || turn == Turn::Last
    }

    /// Issues the reduce-scatter of a unit, which adds to the partial of the microbatch before. On a device the all-reduce of the unit
    /// before follows it.
    pub(super) fn scatter(&mut self, turn: Turn, unit: UnitId) {
        let place = self.block.scatters.len();
        let adds = self.plan.options().accumulation != Accumulation::Local
            && !self.reduces_every_microbatch();
        if adds {
            self.act(Action::Settle(Reference::Earlier(place)));
        }
        let index = self.issue(self.reduce_scatter(unit));
        self.block.scatters.push(index);
        if turn == Turn::MayFollow || !self.reduces_once() {
            return;
        }
        if !self.is_on_device() {
            let all_reduce = self.add(self.all_reduce(unit));
            self.block.all_reduces.push((Reference::Here(index), all_reduce));
        } else if place > 0 {
            let before = self.block.scatters[place - 1];
            self.follow(Reference::Here(before), self.plan.reductions()[place - 1]);
        }
    }

    /// Issues the all-reduce of a unit behind its reduce-scatter.
    pub(super) fn follow(&mut self, scatter: Reference, unit: UnitId) -> usize {
        self.act(Action::Settle(scatter));
        self.issue(self.all_reduce(unit))
    }

    /// In host memory, the last microbatch: the all-reduces that are next, as far as their reduce-scatters are complete.
    pub(super) fn issue_ready(&mut self, turn: Turn) {
        if turn == Turn::Last && self.reduces_once() && !self.is_on_device() {
            self.act(Action::IssueReady);
        }
    }

    /// Mode `Every`: the microbatch's sums are all-reduced, and added to the partials.
    fn all_reduce_and_fold(&mut self) {
        let units = self.plan.reductions();
        let scatters = self.block.scatters.clone();
        let follow =
            |(scatter, unit): (usize, &UnitId)| self.follow(Reference::Here(scatter), *unit);
        let all_reduces: Vec<usize> = scatters.into_iter().zip(units).map(follow).collect();
        for (all_reduce, unit) in all_reduces.into_iter().zip(units) {
            self.need(all_reduce);
            self.compute(Work::Fold(*unit));
        }
    }
}
