//! The end of a step: the all-reduces that are left, the agreement, the update.

use hsdp_flight::Stage;
use hsdp_sharding::Accumulation;

use super::microbatch::Turn;
use super::writer::{INTERIM, STATEMENT, Writer};
use super::{Action, Block, LossScale, Reference, Work};

impl Writer<'_> {
    /// The end of a step whose last microbatch was not known to be the last.
    pub(super) fn finish(mut self) -> Block {
        let plan = self.plan;
        if plan.options().accumulation != Accumulation::Local {
            self.end_of_step((0..plan.reductions().len()).map(Reference::Earlier).collect());
            return self.end();
        }
        // Where ranks ask each other for overflows first, no all-reduce is issued before.
        let turn = match self.step.loss_scale {
            LossScale::Fixed => Turn::Last,
            LossScale::Dynamic => Turn::MayFollow,
        };
        plan.reductions().iter().for_each(|unit| self.scatter(turn, *unit));
        self.issue_ready(turn);
        let scatters = self.block.scatters.iter().copied().map(Reference::Here).collect();
        self.end_of_step(scatters);
        self.end()
    }

    /// All-reduces what is left of these reduce-scatters, exchanges statements, and updates.
    pub(super) fn end_of_step(&mut self, scatters: Vec<Reference>) {
        if self.reduces_once() {
            self.ask_for_overflow(&scatters);
            self.all_reduce_rest(&scatters);
        } else if !self.reduces_every_microbatch() {
            scatters.into_iter().for_each(|scatter| self.act(Action::Need(scatter)));
        }
        self.compute(Work::Norm);
        self.act(Action::Read);
        let bits = self.plan.spec().params().count();
        self.exchange(Stage::Agreement, STATEMENT + bits.div_ceil(u64::BITS as usize));
        self.compute(Work::Update);
    }

    /// With a dynamic loss scale: ranks exchange whether a partial has overflowed.
    fn ask_for_overflow(&mut self, scatters: &[Reference]) {
        if self.step.loss_scale == LossScale::Fixed {
            return;
        }
        scatters.iter().for_each(|scatter| self.act(Action::Need(*scatter)));
        self.act(Action::Read);
        self.exchange(Stage::Agreement, INTERIM);
    }

    fn all_reduce_rest(&mut self, scatters: &[Reference]) {
        let issued = self.all_reduces().count();
        let units = self.plan.reductions();
        if self.is_on_device() || self.block.all_reduces.is_empty() {
            for (scatter, unit) in scatters.iter().zip(units).skip(issued) {
                self.follow(*scatter, *unit);
            }
        } else {
            for (scatter, index) in self.block.all_reduces.clone() {
                self.act(Action::Settle(scatter));
                self.act(Action::Issue(index));
            }
        }
        let all: Vec<usize> = self.all_reduces().collect();
        all.into_iter().for_each(|index| self.need(index));
    }

    /// The indices of the block's all-reduces.
    fn all_reduces(&self) -> impl Iterator<Item = usize> {
        let operations = self.block.operations.iter().enumerate();
        operations.filter(|(_, it)| it.stage == Stage::AllReduce).map(|(index, _)| index)
    }
}
