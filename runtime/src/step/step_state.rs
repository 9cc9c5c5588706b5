//! One step, from its header to its finish.

use std::fmt::Display;
use std::mem;

use hsdp_comm::{Error as CommError, Stage};
use hsdp_sharding::{ParamId, Rank, UnitId};

use crate::agree::presence::Presence;
use crate::error::Error;
use crate::options::StepOptions;
use crate::options::objective::{LossSum, Objective};
use crate::options::uneven::{Input, Supply};
use crate::state::context::Context;
use crate::state::full::Full;
use crate::state::shard::Shard;
use crate::state::sums::Sums;
use crate::step::check;
use crate::step::engine::Opened;
use crate::step::exponent::exponent_of;
use crate::step::gathers::GatherQueue;
use crate::step::place::{Place, Turn};
use crate::step::reductions::Reductions;
use crate::step::unit_gradients::UnitGradients;

/// The microbatch, the attempt and the step that a caller means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) opened: Opened,
    pub(crate) microbatch: usize,
}

/// Whether a step has microbatches to come, where no number was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum More {
    MayFollow,
    /// No: ranks were out of data, as the last supply says.
    Over,
}

/// A microbatch that has begun and not finished.
#[derive(Debug)]
pub(super) struct OpenMicrobatch {
    pub(super) loss: Option<LossSum>,
}

/// A step that has begun and not finished.
#[derive(Debug)]
pub(crate) struct StepState {
    pub(crate) opened: Opened,
    pub(crate) microbatches: Option<usize>,
    /// Whether this rank said, when the step began, that it has data for it.
    input: Input,
    /// Ranks that began the step without data.
    pub(super) absent: Vec<Rank>,
    /// Whether it has microbatches to come.
    pub(super) more: More,
    /// Microbatches finished so far.
    pub(crate) finished: usize,
    /// The agreed power of two that is taken out of every seed, once it is known.
    pub(crate) exponent: Option<i32>,
    pub(crate) weight: u64,
    pub(crate) largest_weight: u64,
    /// Sum over the microbatches: of loss sums, or of means where the objective is a mean over ranks.
    pub(crate) loss: f64,
    pub(crate) reductions: Reductions,
    /// By unit: the buffers of the step's gradients, when it is finished.
    pub(super) sums: Vec<Sums>,
    /// The gathers of the open microbatch.
    pub(crate) gathers: GatherQueue,
    /// The parameters that got a gradient on this rank.
    pub(super) presence: Presence,
    /// The ranks with and without data, as of the last question in the step.
    pub(super) supply: Supply,
    pub(super) open: Option<OpenMicrobatch>,
    /// The first error of this rank in this step, for telling the others why it ended.
    failure: Option<String>,
    /// Whether each call has either done all of its work or refused its arguments. A call that failed or panicked in between may
    /// have lost a partial or a weight.
    is_whole: bool,
}

impl StepState {
    pub(crate) fn new(context: &Context, opened: Opened, options: StepOptions) -> Self {
        let (reductions, sums) = context.kept.take(context);
        Self {
            opened,
            microbatches: options.microbatches,
            input: options.input,
            absent: Vec::new(),
            more: More::MayFollow,
            finished: 0,
            exponent: None,
            weight: 0,
            largest_weight: 0,
            loss: 0.0,
            reductions,
            sums,
            gathers: GatherQueue::default(),
            presence: Presence::none(context.parameters()),
            supply: Supply::default(),
            open: None,
            failure: None,
            is_whole: true,
        }
    }

    /// The step, if `token` means the microbatch that is open in it.
    pub(crate) fn at<'a>(
        step: &'a mut Option<Self>,
        context: &Context,
        token: Token,
        operation: &'static str,
    ) -> Result<&'a mut Self, Error> {
        if step.as_ref().and_then(Self::token) != Some(token) {
            return Err(Error::StalePass {
                operation,
                rank: context.rank(),
                held: format!("microbatch {} of step {}", token.microbatch, token.opened.step),
                current: describe(step.as_ref()),
            });
        }
        Ok(step.as_mut().expect("its token has just been read"))
    }

    fn token(&self) -> Option<Token> {
        let open = |_| Token { opened: self.opened, microbatch: self.finished };
        self.open.as_ref().map(open)
    }

    pub(crate) fn number(&self) -> u64 {
        self.opened.step
    }

    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Runs `act` and remembers its error as the reason for which the step will end.
    pub(crate) fn note<T>(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        // Where `act` panics, and a caller catches that, this stays so.
        let was_whole = mem::replace(&mut self.is_whole, false);
        let result = act(self);
        self.is_whole = was_whole && result.as_ref().err().is_none_or(leaves_whole);
        if let (Err(error), None) = (&result, &self.failure) {
            self.failure = Some(error.to_string());
        }
        result
    }

    /// Remembers an error of the caller as the reason for which the step will end, unless there is one.
    pub(crate) fn note_failure(&mut self, reason: &dyn Display) {
        self.failure.get_or_insert_with(|| reason.to_string());
    }

    /// Refuses to finish a step of which a call has failed in the middle of its work.
    pub(super) fn check_whole(&self, context: &Context) -> Result<(), Error> {
        if self.is_whole {
            return Ok(());
        }
        let failure = self.failure().unwrap_or("a call panicked, and the panic was caught");
        let what = format!("an earlier call of the step failed ({failure}): drop the step");
        Err(context.misuse("finish", self.number(), what))
    }

    pub(crate) fn unshard(
        &mut self,
        context: &Context,
        shards: &[Shard],
        unit: UnitId,
    ) -> Result<Full, Error> {
        let (number, needs_loss) = (self.number(), self.needs_loss(context));
        let has_loss = self.open_microbatch().loss.is_some();
        let gathers = &mut self.gathers;
        if needs_loss && !has_loss && gathers.next_is_backward(context, unit) {
            let what = "the backward pass begins with `loss`: ranks agree on a weight in that call"
                .to_owned();
            return Err(context.misuse("unshard", number, what));
        }
        let turn = gathers.turn_of(context, shards, unit)?;
        let end = self.gathers.end_of_prefetch(context, turn);
        self.reduce_before(context, shards, end)?;
        self.gathers.take_at(context, shards, (turn, unit))
    }

    pub(crate) fn take_loss(
        &mut self,
        context: &Context,
        shards: &[Shard],
        loss: LossSum,
    ) -> Result<(), Error> {
        let number = self.number();
        self.check_weight(context, loss.weight())?;
        if self.open_microbatch().loss.is_some() {
            let what = "this microbatch has its loss already".to_owned();
            return Err(context.misuse("loss", number, what));
        }
        self.add_weight(context, loss.weight())?;
        self.open_microbatch().loss = Some(loss);
        self.gathers.end_forward(context, shards)?;
        self.largest_weight = self.largest_weight.max(loss.weight());
        self.loss += match context.options.objective {
            Objective::RankMean => loss.mean(),
            _ => loss.sum(),
        };
        if self.exponent.is_none() {
            self.exponent = Some(self.agree_on_exponent(context, loss)?);
        }
        Ok(())
    }

    fn check_weight(&self, context: &Context, weight: u64) -> Result<(), Error> {
        if self.input == Input::Ready || weight == 0 {
            return Ok(());
        }
        let what =
            format!("the loss has weight {weight}, but the rank began the step without data");
        Err(context.misuse("loss", self.number(), what))
    }

    fn add_weight(&mut self, context: &Context, weight: u64) -> Result<(), Error> {
        match self.weight.checked_add(weight) {
            Some(sum) => self.weight = sum,
            None => {
                let what =
                    format!("the weights {} and {weight} add up to 2^64 or more", self.weight);
                return Err(context.misuse("loss", self.number(), what));
            }
        }
        Ok(())
    }

    /// Asks all ranks for the weight of this microbatch: in the first step, where no rank gave a hint.
    fn agree_on_exponent(&self, context: &Context, loss: LossSum) -> Result<i32, Error> {
        let tag = context.tag(None, Stage::Header, self.number(), self.finished);
        let heaviest = |weights: &[u64]| weights.iter().copied().max().unwrap_or(0);
        Ok(exponent_of(context.control.exchange_in_step(tag, [loss.weight()], heaviest)?))
    }

    pub(crate) fn reduce(
        &mut self,
        (context, shards): (&Context, &[Shard]),
        scale: f64,
        (unit, gradients): (UnitId, UnitGradients),
    ) -> Result<(), Error> {
        self.check_seeded(context, scale)?;
        check::gradients(context, self.number(), unit, &gradients)?;
        let place = self.place();
        self.reductions.check_offer(context, place, unit)?;
        // The order of reductions is that of the forward, which is over on this rank.
        self.gathers.end_finding(context, shards)?;
        let gradients = self.of_items(context, gradients);
        for (index, gradient) in gradients.entries.iter().enumerate() {
            if gradient.is_some() {
                self.presence.insert(context.number_of(ParamId { unit, index }));
            }
        }
        let span =
            tracing::trace_span!("reduce", unit = unit.index(), microbatch = place.microbatch);
        self.reductions.follow(self.gathers.issued());
        span.in_scope(|| self.reductions.offer(context, place, (unit, gradients)))
    }

    /// Drops the gradients of a microbatch without items, where weights enter: the mean of nothing may be NaN, and 0
    /// times NaN is NaN too.
    fn of_items(&mut self, context: &Context, mut gradients: UnitGradients) -> UnitGradients {
        let is_empty = self.open_microbatch().loss.is_some_and(|loss| loss.weight() == 0);
        if is_empty && context.options.objective.is_weighted() {
            gradients.entries.fill(None);
        }
        gradients
    }

    /// Whether ranks agree on a size of gradients before a backward begins.
    fn needs_loss(&self, context: &Context) -> bool {
        context.options.objective.is_weighted()
    }

    /// Refuses the gradients of a backward that started without a seed: they have another size than those of its peers.
    fn check_seeded(&mut self, context: &Context, scale: f64) -> Result<(), Error> {
        let number = self.number();
        let seeds_are_one = !self.needs_loss(context) && scale == 1.0;
        if self.open_microbatch().loss.is_some() || seeds_are_one {
            return Ok(());
        }
        let what =
            "gradients come before the loss: call `loss` and start the backward from its seed"
                .to_owned();
        Err(context.misuse("reduce", number, what))
    }

    pub(crate) fn finish_microbatch(
        &mut self,
        context: &Context,
        shards: &[Shard],
    ) -> Result<(), Error> {
        let place = self.place();
        if self.open_microbatch().loss.is_none() && self.needs_loss(context) {
            // This rank has no items: the other ranks agree with it in their `loss`.
            self.take_loss(context, shards, LossSum::new(0.0, 0))?;
        }
        self.reduce_rest(context, shards)?;
        self.gathers.finish(context, shards)?;
        self.reductions.follow(self.gathers.issued());
        self.reductions.finish_microbatch(context, place)?;
        self.open = None;
        self.finished += 1;
        Ok(())
    }

    /// Where the step is: in its open microbatch, or in the last one that was finished.
    pub(crate) fn place(&self) -> Place {
        let microbatch =
            if self.open.is_some() { self.finished } else { self.finished.saturating_sub(1) };
        let turn = match self.microbatches {
            Some(count) if microbatch + 1 == count => Turn::Last,
            _ => Turn::MayFollow,
        };
        Place { step: self.number(), microbatch, turn }
    }

    fn open_microbatch(&mut self) -> &mut OpenMicrobatch {
        self.open.as_mut().expect("`at` has checked that a microbatch is open")
    }
}

/// Whether a call with this error has changed nothing, or every later call of the step has an error too.
fn leaves_whole(error: &Error) -> bool {
    match error {
        Error::Comm(error) => error.is_fatal() || matches!(error, CommError::StepAborted { .. }),
        Error::Misuse { .. } | Error::Size { .. } => true,
        Error::UnevenInputs { .. } | Error::EndOfData { .. } => true,
        _ => false,
    }
}

fn describe(step: Option<&StepState>) -> String {
    match step {
        None => "no step is under way".to_owned(),
        Some(step) if step.open.is_some() => {
            format!("the model is in microbatch {} of step {}", step.finished, step.number())
        }
        Some(step) => format!("the model is between microbatches of step {}", step.number()),
    }
}
