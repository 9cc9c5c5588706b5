//! The host of the step's machine on a rank: it carries out the outputs, and returns the
//! conclusions of exchanges.

use hsdp_comm::Stage;
use hsdp_sharding::UnitId;
use hsdp_sharding::step::{
    Conclusion, Exchange, Input, NextUnit, Operation, Output, Refused, UnitUse,
};

use crate::agree::agreement::Interim;
use crate::agree::{comparison, header, unit_use};
use crate::error::Error;
use crate::state::context::Context;
use crate::state::full::Full;
use crate::step::exponent::exponent_of;
use crate::step::reductions::StepPlace;
use crate::step::refused::{self, Call};
use crate::step::state::State;

impl State {
    /// Carries out the outputs of the machine, until it has answered its last input. Returns the
    /// unit that it hands to the program, if it hands one.
    ///
    /// # Errors
    /// Errors of collectives and of memory, and those on which ranks agree by their records. The
    /// machine still waits then, and no call of the step can go on. A conclusion that the machine
    /// refuses leaves it as it was.
    pub(super) fn drive(
        &mut self,
        context: &Context,
        operation: &'static str,
    ) -> Result<Option<Full>, Error> {
        let (mut handed, mut has_agreed) = (None, false);
        while let Some(output) = self.machine.poll() {
            let at = self.place();
            match output {
                Output::Exchange(exchange) => {
                    let conclusion = self.exchange(context, exchange)?;
                    let concluded = self.machine.conclude(conclusion);
                    concluded.map_err(|refused| self.refused(context, operation, refused))?;
                    self.note_absent(context, exchange);
                    has_agreed |= matches!(exchange, Exchange::Unit { .. });
                }
                Output::Gather { place, unit, phase } => {
                    let shard = &self.shards[unit.index()];
                    self.gathers.issue(context, at, shard, place, unit, phase)?;
                }
                Output::Hand { place, unit, phase } => {
                    handed = Some(self.gathers.hand(context, at, place, unit, phase));
                }
                Output::Free { place, .. } => self.gathers.free(place),
                Output::Accumulate(unit) => self.reductions.accumulate(context, at, unit)?,
                Output::ReduceScatter { unit, from, into } => {
                    self.reductions.reduce_scatter(context, at, unit, from, into)?;
                    self.note_scattered(context)?;
                }
                Output::AllReduce(unit) => {
                    self.reductions.all_reduce(context, at, unit)?;
                    self.note_scattered(context)?;
                }
                Output::Fold(unit) => self.reductions.fold(context, at, unit)?,
                Output::Await(operation) | Output::Follow(operation) => {
                    self.wait(context, at, operation)?;
                }
            }
        }
        if has_agreed {
            // The forward may have found the order of the units.
            context.full_pool.set_limit(self.machine.plan().memory().full);
        }
        handed.transpose()
    }

    /// Waits for an operation, and reports it to the machine.
    fn wait(
        &mut self,
        context: &Context,
        at: StepPlace,
        operation: Operation,
    ) -> Result<(), Error> {
        match operation {
            Operation::Gather { place, unit, phase } => {
                self.gathers.wait(context, at, place, unit, phase)?;
            }
            Operation::ReduceScatter(unit) | Operation::AllReduce(unit) => {
                self.reductions.wait(context, unit)?;
            }
        }
        self.machine.done(operation).expect("the machine waits for it");
        Ok(())
    }

    /// Reports the reduce-scatter that the machine watches, if it is complete: an all-reduce may
    /// follow it.
    pub(super) fn note_scattered(&mut self, context: &Context) -> Result<(), Error> {
        match self.machine.watching() {
            Some(watched @ Operation::ReduceScatter(unit))
                if self.reductions.is_scattered(unit) =>
            {
                let at = self.place();
                self.wait(context, at, watched)
            }
            _ => Ok(()),
        }
    }

    /// Returns the place of the next operation: in the open microbatch, or behind the last one.
    pub(super) fn place(&self) -> StepPlace {
        let finished = self.machine.microbatches();
        let is_open = self.machine.has_microbatch();
        let microbatch = if is_open { finished } else { finished.saturating_sub(1) };
        StepPlace { step: self.next_step, microbatch }
    }

    /// Returns the error of a call that the machine has refused.
    pub(super) fn refused(
        &self,
        context: &Context,
        operation: &'static str,
        refused: Refused,
    ) -> Error {
        let call = Call { operation, step: self.next_step, committed: self.committed };
        refused::error(context, call, refused)
    }

    /// Exchanges records with all ranks.
    fn exchange(&mut self, context: &Context, exchange: Exchange) -> Result<Conclusion, Error> {
        match exchange {
            Exchange::Headers => self.exchange_headers(context),
            Exchange::Samples => self.compare_samples(context),
            Exchange::Replicas => {
                comparison::of_replicas(context, &self.shards, self.next_step)?;
                Ok(Conclusion::Agreed)
            }
            Exchange::Microbatch(input) => self.ask_for_data(context, Stage::Header, input),
            Exchange::Unit { says, place } => self.agree_on_unit(context, says, place),
            Exchange::Weights => self.agree_on_weights(context),
            Exchange::Interim { all_reduces } => self.ask_for_overflow(context, all_reduces),
            Exchange::Statement => self.state_step(context),
            Exchange::Batch(input) => self.ask_for_data(context, Stage::Evaluation, input),
            Exchange::Mean => self.add_up(context),
        }
    }

    /// Learns which ranks have another microbatch, or another batch.
    fn ask_for_data(
        &mut self,
        context: &Context,
        stage: Stage,
        input: Input,
    ) -> Result<Conclusion, Error> {
        let tag = context.tag(None, stage, self.next_step, self.machine.microbatches());
        let decode = |said: &[u64]| header::decode_microbatches(said, context.rank());
        let said = header::encode_microbatch(input);
        let supply = context.control.exchange_in_step(tag, said, decode)??;
        Ok(Conclusion::Supply(supply))
    }

    /// After an exchange about data: notes the ranks that take part without their programs, in the
    /// microbatch or batch that follows, or else in the rest of the step.
    fn note_absent(&self, context: &Context, exchange: Exchange) {
        if !matches!(exchange, Exchange::Microbatch(_) | Exchange::Batch(_)) {
            return;
        }
        let absent = match &self.step {
            _ if self.machine.has_microbatch() => {
                self.machine.supply().map_or(&[][..], |supply| &supply.exhausted)
            }
            Some(step) => &*step.absent,
            None => &[],
        };
        context.world.set_absent(absent);
    }

    /// Agrees on the next unit of a forward that finds the order.
    fn agree_on_unit(
        &self,
        context: &Context,
        says: UnitUse,
        place: usize,
    ) -> Result<Conclusion, Error> {
        let StepPlace { step, microbatch } = self.place();
        let tag = context.tag(None, Stage::Header, step, microbatch);
        let (declared, found) = (context.plan.order(), self.machine.found());
        let decide = |said: &[u64]| unit_use::decide(said, declared, found, context.rank());
        let said = unit_use::encode(says, place);
        let (place, next) = context.control.exchange_in_step(tag, said, decide)??;
        if let (NextUnit::Differ(ranks), Some(_)) = (&next, &self.step)
            && context.rank().index() == 0
        {
            unit_use::warn(step, *ranks, context.plan.spec());
        }
        Ok(Conclusion::Unit(place, next))
    }

    /// Learns the largest weight of the microbatch.
    fn agree_on_weights(&mut self, context: &Context) -> Result<Conclusion, Error> {
        let StepPlace { step, microbatch } = self.place();
        let tag = context.tag(None, Stage::Header, step, microbatch);
        let heaviest = |weights: &[u64]| weights.iter().copied().max().unwrap_or(0);
        let state = self.step.as_mut().expect("weights are exchanged in a step");
        let weight = state.loss.map_or(0, |loss| loss.weight());
        let heaviest = context.control.exchange_in_step(tag, [weight], heaviest)?;
        state.exponent = Some(exponent_of(heaviest));
        Ok(Conclusion::Agreed)
    }

    /// Learns whether a partial has overflowed on some rank.
    fn ask_for_overflow(
        &mut self,
        context: &Context,
        all_reduces: usize,
    ) -> Result<Conclusion, Error> {
        let StepPlace { step, microbatch } = self.place();
        let sighting = self.reductions.sighting(context, step)?;
        let said = Interim { all_reduces, sighting }.encode();
        let tag = context.tag(None, Stage::Agreement, step, microbatch);
        let overflow = context.control.exchange_in_step(tag, said, Interim::overflow)?;
        Ok(Conclusion::Overflow(overflow.map(|overflow| overflow.all_reduces)))
    }

    /// Needs a unit, and returns it.
    pub(super) fn need(&mut self, context: &Context, unit: UnitId) -> Result<Full, Error> {
        let operation = "unshard";
        self.machine.need(unit).map_err(|refused| self.refused(context, operation, refused))?;
        let handed = self.drive(context, operation)?;
        Ok(handed.expect("the machine answers a need with the unit"))
    }
}
