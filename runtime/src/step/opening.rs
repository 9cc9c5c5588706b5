//! Where a step begins, or a rank ends its run: the ranks exchange headers. PROTOCOL.md, "A step".

use std::mem;
use std::sync::atomic::Ordering;

use hsdp_comm::Stage;
use hsdp_sharding::step::Course;

use crate::agree::comparison::{self, LastUpdate};
use crate::agree::header::{Agreed, Intent, StepHeader};
use crate::agree::samples;
use crate::error::Error;
use crate::options::StepOptions;
use crate::options::uneven::{EndOfRun, Supply};
use crate::state::joint;
use crate::state::lock::Locked;
use crate::step::engine::{Begun, Engine, Opened, State};
use crate::step::exponent::exponent_known_early;
use crate::step::step_state::StepState;

impl Engine {
    /// Exchanges headers, and opens the step if it takes place.
    pub(crate) fn begin_step(&self, options: StepOptions) -> Result<Begun, Error> {
        let mut state = self.state_between_steps("begin_step")?;
        let step = state.next_step;
        joint::run(&self.context.world, step, || {
            self.check_own_shards(&state, "begin_step")?;
            self.check_microbatches(step, options)
        })?;
        let said = Intent::Step(options.input);
        let epoch = self.context.world.epoch();
        let (Agreed { largest_hint, supply, shutdown, .. }, course) =
            self.meet(&mut state, said, options)?;
        match course {
            Course::Goes => self.context.world.set_absent(&supply.exhausted),
            Course::Ends => {
                self.context.world.set_absent(&[]);
                return Ok(Begun::End(EndOfRun { step, supply }));
            }
        }
        if self.is_compared_before(step) {
            comparison::of_replicas(&self.context, &state.shards, step)?;
        }
        self.warn_of_forgotten(step);
        state.attempts += 1;
        let attempt = state.attempts;
        let opened = Opened { step, attempt, epoch };
        let mut begun = StepState::new(&self.context, opened, options);
        begun.absent = supply.exhausted.clone();
        (state.supply, state.shutdown) = (supply, shutdown);
        begun.exponent = exponent_known_early(self.context.options.objective, largest_hint);
        state.step = Some(begun);
        self.under_way.store(attempt, Ordering::Release);
        Ok(Begun::Step(opened))
    }

    /// Tells all ranks that this one makes no more steps, and learns whether another rank does.
    pub(crate) fn end_run(&self) -> Result<(), Error> {
        let mut state = self.state_between_steps("end_run")?;
        self.meet(&mut state, Intent::End, StepOptions::default())?;
        self.context.world.set_absent(&[]);
        Ok(())
    }

    /// The digest of the last update, for [`compare_updates`](Self::compare_updates).
    pub(crate) fn digest_of_update(&self) -> u64 {
        let state = self.state();
        state.updated.digest(state.next_step)
    }

    /// Compares the digests of the last update that all ranks have `said`. Collective over the world if they differ.
    ///
    /// # Errors
    /// [`Error::Disagreement`] on all ranks; [`Error::Comm`].
    pub(crate) fn compare_updates(&self, said: &[u64]) -> Result<(), Error> {
        let state = self.state();
        let last = LastUpdate { updated: &state.updated, finished: state.next_step };
        comparison::of_updates(&self.context, last, said)
    }

    /// Ends the world if an update has stopped in its middle: the values of no step are there to be saved.
    ///
    /// # Errors
    /// The end of the world.
    pub(crate) fn check_updated(&self) -> Result<(), Error> {
        let half_updated = self.state().half_updated;
        half_updated.map_or(Ok(()), |step| Err(self.end_half_updated(step)))
    }

    /// The state, if no step is under way, and the last update has ended. A step that was leaked is discarded: no caller can finish it any more.
    pub(super) fn state_between_steps(
        &self,
        operation: &'static str,
    ) -> Result<Locked<'_, State>, Error> {
        let state = self.state();
        if let Some(half) = state.half_updated {
            return Err(self.end_half_updated(half));
        }
        let (opened, leaked) = match (&state.step, &state.evaluation) {
            (Some(step), _) => (step.opened, format!("step {}", step.number())),
            (None, Some(evaluation)) => (evaluation.opened, "an evaluation".to_owned()),
            (None, None) => return Ok(state),
        };
        let what = format!("{leaked} was neither finished nor dropped");
        let error = self.context.misuse(operation, state.next_step, what);
        drop(state);
        self.abort_leaked_step(opened, &error);
        Err(error)
    }

    /// Ends the world, since parameters are neither those before the update of a step nor those after it.
    fn end_half_updated(&self, step: u64) -> Error {
        let what = "the update has not ended, by a panic or a device that failed: some parameters are updated and others \
                    are not";
        let error = self.context.misuse("optimizer step", step, what.to_owned());
        self.context.world.abort(&error.to_string());
        self.context.world.end().map_or(error, Error::Comm)
    }

    /// # Errors
    /// [`Error::Misuse`] while other shards are in the place of the model's.
    pub(crate) fn check_own_shards(
        &self,
        state: &State,
        operation: &'static str,
    ) -> Result<(), Error> {
        if state.own_shards.is_none() {
            return Ok(());
        }
        let what = "inside with_shards the model has averaged parameters, for evaluation: its own are trained and saved outside";
        Err(self.context.misuse(operation, state.next_step, what.to_owned()))
    }

    fn check_microbatches(&self, step: u64, options: StepOptions) -> Result<(), Error> {
        if options.microbatches != Some(0) {
            return Ok(());
        }
        let what = "a step of 0 microbatches has nothing to reduce".to_owned();
        Err(self.context.misuse("begin_step", step, what))
    }

    /// Exchanges headers where the next step would begin. Returns the agreement of the ranks and the course that follows.
    fn meet(
        &self,
        state: &mut State,
        intent: Intent,
        options: StepOptions,
    ) -> Result<(Agreed, Course), Error> {
        let step = state.next_step;
        self.context.world.set_step(step);
        let before = mem::take(&mut state.supply);
        let header = StepHeader {
            step,
            committed: state.committed,
            microbatches: options.microbatches,
            model: self.context.digest,
            order: self.context.schedules.digest(),
            update: state.updated.digest(step),
            loss_scale: state.loss_scale.value().to_bits(),
            weight_hint: options.weight_hint.unwrap_or(state.last_weight),
            intent,
            shutdown: options.shutdown,
            samples: options.samples,
        };
        let agreed = self.exchange(&header, before, state)?;
        let Agreed { supply, ending, .. } = &agreed;
        match supply.course(self.context.options.uneven) {
            Some(Course::Ends) => Ok((agreed, Course::Ends)),
            // A rank that ends its run takes no part in steps of other ranks, not even without data.
            _ if !ending.is_empty() => Err(Error::UnevenEnds {
                step,
                committed: state.committed,
                ending: ending.clone(),
                ready: supply.ready.clone(),
            }),
            Some(Course::Goes) => Ok((agreed, Course::Goes)),
            None => {
                let supply = Supply::clone(supply);
                Err(Error::UnevenInputs { step, microbatch: None, supply })
            }
        }
    }

    fn exchange(
        &self,
        header: &StepHeader,
        before: Supply,
        state: &State,
    ) -> Result<Agreed, Error> {
        let tag = self.context.tag(None, Stage::Header, header.step, 0);
        let agree = |said: &[u64]| StepHeader::agree(said, before);
        let last = LastUpdate { updated: &state.updated, finished: header.step };
        let agreed = self.context.control.exchange(tag, header.encode(), agree)?;
        let agreed = agreed.map_err(|error| comparison::in_detail(&self.context, last, error))?;
        samples::compare(&self.context, header, &agreed).map(|()| agreed)
    }

    /// Whether replicas compare their shards before this step.
    fn is_compared_before(&self, step: u64) -> bool {
        let every = self.context.options.compare_replicas;
        step > 0 && every.is_some_and(|every| step.is_multiple_of(every.get()))
    }

    /// Warns, once, of gradients that an optimizer should have taken.
    fn warn_of_forgotten(&self, next: u64) {
        let Some(step) = self.context.kept.take_forgotten() else { return };
        let rank = self.context.rank().index();
        hsdp_warnings::warn!(
            rank,
            step,
            next,
            "the gradients of a step were dropped, and no optimizer has updated the parameters with them: pass them to an optimizer"
        );
    }
}
