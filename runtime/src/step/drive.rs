//! The state of a rank's model that changes from step to step, and the host of the step's machine
//! on a rank: it carries out the outputs, and returns the conclusions of exchanges.

use std::mem;
use std::sync::Arc;

use hsdp_comm::{Error as CommError, Stage, Tag};
use hsdp_kernels::cuda::Seen;
use hsdp_sharding::step::{
    Batches, Conclusion, EvaluationKind, Exchange, Intent, NextUnit, Operation, Output, Refused,
    StepMachine, UnitUse,
};
use hsdp_sharding::{BufferRule, Param, ParamId, Rank, UnitId};

use crate::agree::agreement::{Agreement, EvaluationEnd, EvaluationTotals, Interim, Statement};
use crate::agree::buffers::{BufferAgreement, BufferDifference, BufferWords, DifferenceFound};
use crate::agree::comparison::{LastUpdate, Updated};
use crate::agree::header::{Agreed, SlicesSay, StepHeader};
use crate::agree::{agreement, buffers, comparison, header, unit_use};
use crate::error::Error;
use crate::options::divide::exponent_of;
use crate::options::precision::CurrentScale;
use crate::options::{Shutdown, StepOptions};
use crate::state::buffers::ModelBuffers;
use crate::state::context::Context;
use crate::state::control;
use crate::state::events::Event;
use crate::state::full::Full;
use crate::state::gradients::UnitGradients;
use crate::state::shard::Shard;
use crate::state::sighting::{Sighting, When};
use crate::state::slices::SliceGathers;
use crate::state::sums::{GradShards, GradientSums, SumsPool};
use crate::step::gathers::UnitGathers;
use crate::step::gradients::{Gradients, Verdict};
use crate::step::reductions::{StepPlace, UnitReductions};
use crate::step::refusals::{self, AttemptState, MicrobatchId};
use crate::step::statistics::StatisticsSums;
use crate::step::step_state::{AgreedStep, StepState};

/// The state that changes from step to step.
#[derive(Debug)]
pub(crate) struct EngineState {
    /// This rank's parameters, by unit. Peers read them in place while a gather is under way.
    pub(crate) shards: Vec<Shard>,
    /// The shards of the model while averages are in their place.
    pub(crate) own_shards: Option<Vec<Shard>>,
    /// The buffers, whole on this rank.
    pub(crate) buffers: ModelBuffers,
    pub(crate) loss_scale: CurrentScale,
    /// The number of the next step.
    pub(crate) next_step: u64,
    /// Steps that an optimizer has completed, with an update or a skip.
    pub(crate) committed: u64,
    /// Steps whose update an optimizer has applied: those of `committed` without the skipped ones.
    pub(crate) applied: u64,
    /// Number of checkpoints that have replaced the parameters.
    pub(crate) loads: u64,
    /// Number of checkpoints that were opened of this model.
    pub(crate) opened: u32,
    /// Record of the optimizers' update of the last step.
    pub(crate) updated: Updated,
    /// The step whose update has begun and has not ended.
    pub(crate) half_updated: Option<u64>,
    /// The largest weight that a microbatch of the last step had on this rank.
    pub(crate) last_weight: u64,
    /// Attempts at steps so far: a step that was aborted is tried again with the same number.
    pub(super) attempts: u64,
    /// The evaluations so far.
    pub(super) evaluations: u64,
    /// Whether a rank asked, when the last step began, that it be the last.
    pub(crate) shutdown: Shutdown,
    /// The order of steps and evaluations.
    pub(super) machine: StepMachine,
    pub(super) gathers: UnitGathers,
    pub(super) reductions: UnitReductions,
    /// Gathers of slices, which outlast steps.
    slices: SliceGathers,
    /// How far the gathers of the last update are.
    update: UpdateSlices,
    pub(super) statistics: StatisticsSums,
    /// The source of the sums of a step. Gradients return the sums to it.
    pub(crate) kept: Arc<SumsPool>,
    /// The attempt at a step or an evaluation that is under way.
    pub(super) attempt: Option<AttemptState>,
    /// A step while it begins, or the end of the run.
    pub(super) opening: Option<OpeningStep>,
    /// The numbers of the step that is under way.
    pub(super) step: Option<StepState>,
    /// The evaluation that is under way.
    pub(super) evaluation: Option<EvaluationState>,
}

/// How far the gathers of the slices of the last update are on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UpdateSlices {
    /// All ranks have all slices, or replicas divide no state.
    Whole,
    /// All gathers were issued in this epoch of the world, or are due in it.
    Issued { epoch: u64 },
    /// Some were not issued, or have failed.
    Lost,
}

/// A step while it begins, or the end of the run in its place.
#[derive(Debug)]
pub(super) struct OpeningStep {
    pub(super) header: StepHeader,
    /// Agreement of the ranks, once they have exchanged headers.
    pub(super) agreed: Option<Agreed>,
}

/// An evaluation that has begun and not ended.
#[derive(Debug)]
pub(super) struct EvaluationState {
    /// The gathers of its batches.
    pub(super) kind: EvaluationKind,
    /// The call that ends it on this rank.
    pub(super) end: Option<EvaluationEnd>,
    /// The totals of all ranks, once they have agreed on them.
    pub(super) totals: Option<EvaluationTotals>,
}

impl EngineState {
    /// Makes the state of a model that has made no step.
    pub(super) fn new(context: &Context, shards: Vec<Shard>, buffers: ModelBuffers) -> Self {
        Self {
            shards,
            own_shards: None,
            buffers,
            loss_scale: CurrentScale::new(context.options.loss_scaling),
            next_step: 0,
            committed: 0,
            applied: 0,
            loads: 0,
            opened: 0,
            updated: Updated::default(),
            half_updated: None,
            last_weight: 0,
            attempts: 0,
            evaluations: 0,
            shutdown: Shutdown::default(),
            machine: StepMachine::new(Arc::clone(&context.plan), context.rules()),
            gathers: UnitGathers::default(),
            reductions: UnitReductions::new(context),
            slices: SliceGathers::default(),
            update: UpdateSlices::Whole,
            statistics: StatisticsSums::default(),
            kept: Arc::default(),
            attempt: None,
            opening: None,
            step: None,
            evaluation: None,
        }
    }

    pub(crate) fn is_in_step(&self) -> bool {
        self.step.is_some()
    }

    /// Returns whether gradients of a step still exist: each has a handle to `kept`.
    pub(crate) fn has_gradients_out(&self) -> bool {
        Arc::strong_count(&self.kept) > 1
    }

    /// Returns whether `token` means the microbatch or the batch that is open.
    pub(super) fn is_at(&self, token: MicrobatchId) -> bool {
        let is_same = self.attempt.as_ref().is_some_and(|attempt| attempt.id == token.attempt);
        let is_open = self.machine.has_microbatch();
        let number = self.machine.microbatches();
        is_same && is_open && number == token.microbatch
    }

    /// Checks that `token` means the microbatch or the batch that is open.
    ///
    /// # Errors
    /// [`Error::StalePass`].
    pub(super) fn check_at(
        &self,
        context: &Context,
        token: MicrobatchId,
        operation: &'static str,
    ) -> Result<(), Error> {
        if self.is_at(token) {
            return Ok(());
        }
        let number = self.machine.microbatches();
        let current = match &self.step {
            None => "no step is under way".to_owned(),
            Some(_) if self.machine.has_microbatch() => {
                format!("the model is in microbatch {number} of step {}", self.next_step)
            }
            Some(_) => format!("the model is between microbatches of step {}", self.next_step),
        };
        let held = format!("microbatch {} of step {}", token.microbatch, token.attempt.step);
        Err(Error::StalePass { operation, rank: context.rank(), held, current })
    }

    /// Runs a call of the step or the evaluation that is under way, and notes how it ends.
    ///
    /// # Errors
    /// Errors of the call; [`Error::Misuse`] and [`Error::Comm`] if an earlier call has failed in
    /// the middle of its work.
    pub(super) fn attempt<T>(
        &mut self,
        context: &Context,
        operation: &'static str,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let is_step = self.step.is_some();
        let attempt = self.attempt.as_mut().expect("a step or an evaluation is under way");
        attempt.enter(context, operation, is_step)?;
        let result = call(self);
        if let Some(attempt) = &mut self.attempt {
            attempt.leave(&result);
        }
        result
    }

    pub(super) fn step_mut(&mut self) -> &mut StepState {
        self.step.as_mut().expect("a step is under way")
    }

    /// Begins the update of the last step, if all ranks have agreed on one, and notes its options.
    /// Until [`commit`](Self::commit) some parameters may be updated, and others not.
    pub(crate) fn begin_update(
        &mut self,
        context: &Context,
        gradients: &Gradients,
        options: String,
    ) {
        if gradients.verdict == Verdict::Apply {
            if context.plan.divides_state() {
                self.update = UpdateSlices::Issued { epoch: context.world.epoch() };
            }
            let clipped = &gradients.clipping.lines;
            self.updated.note(self.next_step, options, gradients.max_norm, clipped);
            self.half_updated = Some(gradients.step);
        }
    }

    /// Forgets the last update, since all ranks have replaced all parameters.
    pub(crate) fn forget_update(&mut self) {
        (self.half_updated, self.updated) = (None, Updated::default());
        self.update = UpdateSlices::Whole;
    }

    /// Counts the last step as committed, and its update as applied if the ranks agreed to apply
    /// it.
    pub(crate) fn commit(&mut self, verdict: &Verdict) {
        self.half_updated = None;
        self.committed += 1;
        self.applied += u64::from(*verdict == Verdict::Apply);
    }

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
        let mut handed = None;
        let mut has_agreed = false;
        while let Some(output) = self.machine.poll() {
            let at = self.place();
            match output {
                Output::Exchange(exchange) => {
                    let conclusion = self.exchange(context, exchange)?;
                    let gathers_again = matches!(
                        conclusion,
                        Conclusion::Batches(Batches { gathers_again: true, .. })
                    );
                    let concluded = self.machine.conclude(conclusion);
                    concluded.map_err(|refused| self.refused(context, operation, refused))?;
                    if gathers_again && self.machine.has_microbatch() {
                        self.update = UpdateSlices::Issued { epoch: context.world.epoch() };
                    }
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
                Output::Statistics { unit, index, phase, from } => {
                    self.statistics.issue(context, at, unit, index, phase, from)?;
                }
                Output::Accumulate(unit) => self.reductions.accumulate(context, at, unit)?,
                Output::ReduceScatter { unit, from, into } => {
                    self.reductions.reduce_scatter(context, at, unit, from, into)?;
                    self.note_complete(context)?;
                }
                Output::AllReduce(unit) | Output::ScatterSums(unit) => {
                    self.reductions.reduce_over_replicas(context, at, unit)?;
                    self.note_complete(context)?;
                }
                Output::GatherSlices(unit) => {
                    self.outside_of_steps(context, |this| this.gather_slices(context, unit))?;
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
            Operation::Statistics { .. } => self.statistics.wait(operation)?,
            Operation::ReduceScatter(unit)
            | Operation::AllReduce(unit)
            | Operation::ScatterSums(unit) => self.reductions.wait(context, unit)?,
            Operation::GatherSlices(unit) => self.outside_of_steps(context, |this| {
                let shards = this.own_shards.as_mut().unwrap_or(&mut this.shards);
                this.slices.wait(unit, &mut shards[unit.index()])
            })?,
        }
        self.machine.done(operation).expect("the machine waits for it");
        Ok(())
    }

    /// Reports the operation that the machine watches, if it is complete: a reduction over the
    /// replicas may follow a reduce-scatter, and a gather that is issued ahead the slices of its
    /// unit.
    pub(super) fn note_complete(&mut self, context: &Context) -> Result<(), Error> {
        let Some(watched) = self.machine.watching() else { return Ok(()) };
        let is_complete = match watched {
            Operation::ReduceScatter(unit) => self.reductions.is_scattered(unit),
            Operation::GatherSlices(unit) => self.slices.is_over(unit),
            _ => false,
        };
        if !is_complete {
            return Ok(());
        }
        let at = self.place();
        self.wait(context, at, watched)
    }

    /// Issues the gather of a unit's slices.
    fn gather_slices(&mut self, context: &Context, unit: UnitId) -> Result<(), Error> {
        let shards = self.own_shards.as_mut().unwrap_or(&mut self.shards);
        let site = context.site("gather of slices", self.next_step);
        let tag = context.tag_of_slices(unit, self.next_step);
        context.events.push(Event::GatherSlices { unit });
        let issued = self.slices.issue(site, tag, unit, &mut shards[unit.index()]);
        if issued.is_err() {
            self.update = UpdateSlices::Lost;
        }
        issued
    }

    /// Runs a part of the work on slices. A failure is told to the other ranks, in a step or an
    /// evaluation by its owner.
    fn outside_of_steps(
        &mut self,
        context: &Context,
        part: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self.attempt {
            Some(_) => part(self),
            None => control::between_steps(&context.world, self.next_step, || part(self)),
        }
    }

    /// Returns what this rank says of the gathers of the last update.
    fn slices_say(&self, context: &Context) -> SlicesSay {
        match self.update {
            UpdateSlices::Whole => SlicesSay::Gathered,
            UpdateSlices::Issued { epoch } if epoch == context.world.epoch() => SlicesSay::Gathered,
            UpdateSlices::Issued { .. } | UpdateSlices::Lost => SlicesSay::Lost,
        }
    }

    /// Takes the buffers of shards back from gathers of slices, for reads of this rank's slices.
    /// Waits for gathers that are under way, and so for the updates of other replicas. Returns
    /// whether the shards are whole.
    ///
    /// # Errors
    /// If another thread still uses a buffer after the deadline of the world.
    pub(super) fn settle_slices(&mut self, context: &Context) -> Result<bool, Error> {
        let shards = self.own_shards.as_mut().unwrap_or(&mut self.shards);
        if !self.slices.settle(shards)? {
            self.update = UpdateSlices::Lost;
        }
        Ok(match self.update {
            UpdateSlices::Whole => true,
            // A device may have issued a gather that its epoch has ended.
            UpdateSlices::Issued { epoch } => {
                !self.machine.has_slices_due()
                    && (!context.issues_in_one_order() || epoch == context.world.epoch())
            }
            UpdateSlices::Lost => false,
        })
    }

    /// Waits until the shards are whole, outside of a step. If a rank has lost slices, all ranks
    /// gather all of them once more. Collective over the world.
    ///
    /// # Errors
    /// Errors of an all-gather, and of gathers.
    pub(super) fn await_slices(&mut self, context: &Context) -> Result<(), Error> {
        let operation = "gather of slices";
        let tag = context.tag(None, Stage::GatherSlices, self.next_step, 0);
        let is_lost = u64::from(self.slices_say(context) == SlicesSay::Lost);
        let any = |said: &[u64]| said.iter().any(|said| *said != 0);
        if context.control.exchange(tag, [is_lost], any)? {
            let asked = self.machine.gather_again();
            asked.map_err(|refused| self.refused(context, operation, refused))?;
            self.update = UpdateSlices::Issued { epoch: context.world.epoch() };
        }
        let asked = self.machine.await_slices();
        asked.map_err(|refused| self.refused(context, operation, refused))?;
        let driven = self.drive(context, operation);
        driven.inspect_err(|_| self.abort_machine()).map(drop)
    }

    /// Aborts the machine's step or evaluation. Gathers of slices that it was to issue are lost.
    pub(super) fn abort_machine(&mut self) {
        if self.machine.has_slices_due() {
            self.update = UpdateSlices::Lost;
        }
        self.machine.abort();
    }

    /// Returns the units in the order of updates, which all ranks have agreed on.
    pub(crate) fn updates(&self) -> Vec<UnitId> {
        self.machine.plan().update_order().collect()
    }

    /// Has the slices of a unit that was updated gathered over the replicas, if these divide its
    /// state: now, or where operations go in one sequence, before the unit's next gather. If
    /// another rank has ended the epoch or the world, the update goes on without gathers:
    /// the next call has that error, and the slices are gathered where a step or an evaluation
    /// begins.
    ///
    /// # Errors
    /// Errors of this rank alone, which end the world: the others wait for its slices.
    pub(crate) fn share_updated(&mut self, context: &Context, unit: UnitId) -> Result<(), Error> {
        if !context.plan.divides_state() || self.update == UpdateSlices::Lost {
            return Ok(());
        }
        let asked = self.machine.updated(unit);
        asked.map_err(|refused| self.refused(context, "optimizer step", refused))?;
        let Some(output) = self.machine.poll() else { return Ok(()) };
        assert_eq!(output, Output::GatherSlices(unit), "nothing else is due");
        match self.gather_slices(context, unit) {
            Err(Error::Comm(CommError::World(_) | CommError::StepAborted { .. })) => Ok(()),
            issued => issued,
        }
    }

    /// Returns the place of the next operation: in the open microbatch, or behind the last one.
    fn place(&self) -> StepPlace {
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
        refusals::error(context, operation, self.next_step, self.committed, refused)
    }

    /// Exchanges records with all ranks.
    fn exchange(&mut self, context: &Context, exchange: Exchange) -> Result<Conclusion, Error> {
        match exchange {
            Exchange::Headers => self.exchange_headers(context),
            Exchange::Samples => self.compare_samples(context),
            Exchange::Replicas => {
                comparison::of_replicas(context, &self.shards, &self.buffers, self.next_step)?;
                Ok(Conclusion::Agreed)
            }
            Exchange::Microbatch(input) => {
                let said = header::encode_microbatch(input);
                let decode = header::decode_microbatches;
                let supply = self.ask_for_data(context, Stage::Header, said, decode)?;
                Ok(Conclusion::Supply(supply))
            }
            Exchange::Unit { says, place } => self.agree_on_unit(context, says, place),
            Exchange::Weights => self.agree_on_weights(context),
            Exchange::Interim { all_reduces } => self.ask_for_overflow(context, all_reduces),
            Exchange::Statement => self.state_step(context),
            Exchange::Batch(input) => {
                let kind = self.evaluation_mut().kind;
                let said = header::encode_batch(input, kind, self.slices_say(context));
                let decode = header::decode_batches;
                let batches = self.ask_for_data(context, Stage::Evaluation, said, decode)?;
                Ok(Conclusion::Batches(batches))
            }
            Exchange::Mean => self.add_up(context),
        }
    }

    /// Learns which ranks have another microbatch, or another batch.
    fn ask_for_data<T>(
        &mut self,
        context: &Context,
        stage: Stage,
        said: [u64; Exchange::MICROBATCH],
        decode: fn(&[u64], Rank) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let tag = context.tag(None, stage, self.next_step, self.machine.microbatches());
        let decode = |said: &[u64]| decode(said, context.rank());
        context.control.exchange_in_step(tag, said, decode)?
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
        let declared = context.plan.order();
        let found = self.machine.found();
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
        self.note_complete(context)?;
        self.machine.need(unit).map_err(|refused| self.refused(context, operation, refused))?;
        let handed = self.drive(context, operation)?;
        Ok(handed.expect("the machine answers a need with the unit"))
    }

    /// Exchanges headers where the next step would begin, and what follows from them. Returns the
    /// agreement of the ranks.
    pub(super) fn open(
        &mut self,
        context: &Context,
        intent: Intent,
        options: StepOptions,
    ) -> Result<Agreed, Error> {
        let step = self.next_step;
        context.world.set_step(step);
        let header = StepHeader {
            step,
            committed: self.committed,
            model: context.digest,
            order: if self.machine.is_settled() { self.machine.plan().order_digest() } else { 0 },
            update: self.updated.digest(step),
            loss_scale: self.loss_scale.value().to_bits(),
            weight_hint: options.weight_hint.unwrap_or(self.last_weight),
            intent,
            shutdown: options.shutdown,
            samples: options.samples,
            slices: self.slices_say(context),
        };
        self.opening = Some(OpeningStep { header, agreed: None });
        let driven = self.drive(context, "begin_step");
        let agreed = self.opening.take().and_then(|opening| opening.agreed);
        if let Err(error) = driven {
            self.abort_machine();
            return Err(error);
        }
        let agreed = agreed.expect("the ranks have exchanged headers");
        if agreed.headers.gathers_again && self.machine.is_in_step() {
            self.update = UpdateSlices::Issued { epoch: context.world.epoch() };
        }
        Ok(agreed)
    }

    /// Exchanges step headers.
    fn exchange_headers(&mut self, context: &Context) -> Result<Conclusion, Error> {
        let opening = self.opening.as_mut().expect("a step begins");
        let header = &opening.header;
        let tag = context.tag(None, Stage::Header, header.step, 0);
        let last = LastUpdate { updated: &self.updated, finished: header.step };
        let agreed = context.control.exchange(tag, header.encode(), StepHeader::agree)?;
        let agreed = agreed.map_err(|error| comparison::in_detail(context, last, error))?;
        let headers = agreed.headers.clone();
        opening.agreed = Some(agreed);
        Ok(Conclusion::Headers(headers))
    }

    /// Compares the samples of all ranks.
    fn compare_samples(&self, context: &Context) -> Result<Conclusion, Error> {
        let opening = self.opening.as_ref().expect("a step begins");
        header::compare_samples(context, &opening.header)?;
        Ok(Conclusion::Agreed)
    }

    /// Takes a unit's gradients of the open microbatch.
    pub(super) fn reduce(
        &mut self,
        context: &Context,
        unit: UnitId,
        gradients: UnitGradients,
    ) -> Result<(), Error> {
        let scale = self.loss_scale.value();
        let step = self.step_mut();
        step.check_seeded(context, scale)?;
        gradients.check(context, step.number, unit)?;
        let gradients = step.of_items(context, gradients);
        match self.machine.offer(unit) {
            // The unit has no gradient, as was checked.
            Err(Refused::Frozen { .. }) => return Ok(()),
            offered => offered.map_err(|refused| self.refused(context, "reduce", refused))?,
        }
        for (index, gradient) in gradients.entries.iter().enumerate() {
            if gradient.is_some() {
                self.step_mut().presence.insert(context.number_of(ParamId { unit, index }));
            }
        }
        self.reductions.offer(unit, gradients);
        self.note_complete(context)?;
        self.drive(context, "reduce").map(drop)
    }

    /// Exchanges statements with all ranks, when the reductions of the step are complete.
    fn state_step(&mut self, context: &Context) -> Result<Conclusion, Error> {
        let StepPlace { step: number, microbatch } = self.place();
        let microbatches = self.machine.microbatches() as u64;
        let grad_shards = GradShards::new(self.reductions.take_sums(), &self.kept);
        let seen = GradientSums::survey(context.site("norm", number), grad_shards.all())?;
        let step = self.step.as_mut().expect("a step is under way");
        let statement = Statement {
            microbatches,
            weight: step.weight,
            loss: step.total_loss,
            squared_norm: seen.iter().map(|seen| seen.squared_norm).sum(),
            sighting: None,
            operations: context.operations_word(),
            presence: mem::take(&mut step.presence),
            buffers: BufferWords::of(&self.buffers),
        };
        let found = self.reductions.sighting_of_step(context, number, grad_shards.all())?;
        let sighting = found.or_else(|| first_after_all_reduce(context, &statement, &seen));
        let statement = Statement { sighting, ..statement };
        let tag = context.tag(None, Stage::Agreement, number, microbatch);
        let ranks = context.plan.mesh().world_size();
        let decode = |said: &[u64]| Agreement::decode(said, ranks, context.plan.spec());
        let agreement = context.control.exchange_in_step(tag, statement.words(), decode)?;
        context.check_operations(agreement.operations())?;
        // Each rank has gathered each unit in the step.
        self.update = UpdateSlices::Whole;
        let buffers = agreement.buffers(context.plan.spec());
        step.agreed = Some(AgreedStep { grad_shards, agreement });
        self.agree_on_buffers(context, tag, buffers)?;
        Ok(Conclusion::Agreed)
    }

    /// Makes the buffers those on which all ranks have agreed. Ranks that lack values, because
    /// they had no data, get them in one broadcast more.
    fn agree_on_buffers(
        &mut self,
        context: &Context,
        tag: Tag,
        agreed: Result<BufferAgreement, BufferDifference>,
    ) -> Result<(), Error> {
        let agreed = agreed.map_err(|difference| buffers_differ(context, tag.step, difference))?;
        let Some(source) = agreed.source else { return Ok(()) };
        if !agreed.lacking.is_empty() {
            let own: Vec<f32> =
                self.buffers.of_rule(BufferRule::Equal).flatten().copied().collect();
            let words = own.chunks(2).map(buffers::pair).collect();
            let words = context.control.words_of_in_step(tag, source, words)?;
            let mut values: Vec<f32> = words.into_iter().flat_map(buffers::unpair).collect();
            values.truncate(own.len());
            self.buffers.replace(BufferRule::Equal, &values);
        }
        self.buffers.replace(BufferRule::Averaged, &agreed.averaged);
        Ok(())
    }

    pub(super) fn evaluation_mut(&mut self) -> &mut EvaluationState {
        self.evaluation.as_mut().expect("an evaluation is under way")
    }

    pub(super) fn refused_in_evaluation(
        &self,
        context: &Context,
        operation: &'static str,
        refused: Refused,
    ) -> Error {
        match refused {
            Refused::Unfinished { .. } => {
                let what = "the last batch was begun and not finished".to_owned();
                context.misuse(operation, self.next_step, what)
            }
            refused => self.refused(context, operation, refused),
        }
    }

    /// Adds up the sums of all ranks.
    fn add_up(&mut self, context: &Context) -> Result<Conclusion, Error> {
        let tag = context.tag(None, Stage::Evaluation, self.next_step, self.machine.microbatches());
        let end = self.evaluation_mut().end.expect("a call ends the evaluation");
        let said = end.encode(context.operations_word());
        let decode = |said: &[u64]| agreement::decode_ends(said, context.rank());
        let totals = context.control.exchange_in_step(tag, said, decode)??;
        context.check_operations(totals.operations)?;
        self.evaluation_mut().totals = Some(totals);
        Ok(Conclusion::Agreed)
    }
}

/// Returns the error of a buffer that is not equal on all ranks.
fn buffers_differ(context: &Context, step: u64, difference: BufferDifference) -> Error {
    let BufferDifference { buffer, ranks: [rank, other], found } = difference;
    let declared = context.plan.spec().buffers().nth(buffer);
    let (_, Param { name, .. }) = declared.expect("ranks have one model");
    let (what, numbers) = match found {
        DifferenceFound::Written(digests) => {
            let what = format!(
                "buffer {name}, which the forward of step {step} has written: write values that \
                 are equal on all ranks, or declare it as averaged_buffer: its digest"
            );
            (what, digests.map(|digest| format!("{digest:#018x}")))
        }
        DifferenceFound::Unwritten(digests) => {
            let what = format!(
                "buffer {name}, which the forward of step {step} has not written, so it has \
                 changed outside of it: its digest"
            );
            (what, digests.map(|digest| format!("{digest:#018x}")))
        }
        DifferenceFound::Writes(counts) => {
            let what = format!(
                "the number of microbatches of step {step} that have written buffer {name}"
            );
            (what, counts.map(|count| count.to_string()))
        }
    };
    let [got, want] = numbers;
    Error::Disagreement { what: what.into(), rank, got, other, want }
}

/// Returns the first element that is not finite though this rank's partials were, in the plan's
/// order.
fn first_after_all_reduce(
    context: &Context,
    statement: &Statement,
    seen: &[Seen],
) -> Option<Sighting> {
    if statement.squared_norm.is_finite() {
        return None;
    }
    seen.iter().enumerate().find_map(|(unit, seen)| {
        let at = usize::try_from(seen.first_non_finite?).unwrap_or(usize::MAX);
        let parameter = context.parameter_at(UnitId::new(unit), at)?;
        Some(Sighting { when: When::AllReduce, parameter, from: None })
    })
}
