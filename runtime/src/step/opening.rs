//! Where a step begins, or a rank ends its run: the ranks exchange headers. PROTOCOL.md, "A step".

use std::sync::atomic::Ordering;

use hsdp_comm::Stage;
use hsdp_sharding::step::{Begin, Conclusion, Intent};

use crate::agree::comparison::{self, LastUpdate};
use crate::agree::header::{self, Agreed, StepHeader};
use crate::error::Error;
use crate::options::StepOptions;
use crate::options::uneven::EndOfRun;
use crate::state::context::Context;
use crate::state::joint;
use crate::state::lock::Locked;
use crate::step::attempt::{Attempt, Opened};
use crate::step::engine::{Begun, Engine};
use crate::step::exponent::exponent_known_early;
use crate::step::state::{Opening, State};
use crate::step::step_state::StepState;

impl Engine {
    /// Exchanges headers, and opens the step if it takes place.
    pub(crate) fn begin_step(&self, options: StepOptions) -> Result<Begun, Error> {
        let mut state = self.state_between_steps("begin_step")?;
        let step = state.next_step;
        let StepOptions { microbatches, input, .. } = options;
        joint::run(&self.context.world, step, || {
            self.check_own_shards(&state, "begin_step")?;
            let begun =
                state.machine.begin(Begin { step, intent: Intent::Step { microbatches, input } });
            begun.map_err(|refused| state.refused(&self.context, "begin_step", refused))
        })?;
        let epoch = self.context.world.epoch();
        let Agreed { headers, shutdown } =
            state.open(&self.context, Intent::Step { microbatches, input }, options)?;
        let supply = headers.supply;
        if !state.machine.is_in_step() {
            self.context.world.set_absent(&[]);
            return Ok(Begun::End(EndOfRun { step, supply }));
        }
        self.context.world.set_absent(&supply.exhausted);
        state.attempts += 1;
        let attempt = state.attempts;
        let opened = Opened { step, attempt, epoch };
        let mut begun = StepState::new(&self.context, step, options);
        begun.absent.clone_from(&supply.exhausted);
        begun.exponent = exponent_known_early(self.context.options.objective, headers.weight_hint);
        state.shutdown = shutdown;
        let sums = state.kept.take(&self.context.plan);
        state.reductions.begin(sums);
        (state.attempt, state.step) = (Some(Attempt::new(opened)), Some(begun));
        self.under_way.store(attempt, Ordering::Release);
        // The program's subscriber may panic. Then the next call between steps aborts this step.
        self.warn_of_forgotten(&state, step);
        Ok(Begun::Step(opened))
    }

    /// Exchanges with all ranks that this one makes no more steps.
    ///
    /// # Errors
    /// [`DataError::UnevenEnds`](crate::DataError::UnevenEnds) if another rank has data for a step.
    pub(crate) fn end_run(&self) -> Result<(), Error> {
        let mut state = self.state_between_steps("end_run")?;
        let begin = Begin { step: state.next_step, intent: Intent::End };
        let begun = state.machine.begin(begin);
        begun.expect("no step is under way");
        state.open(&self.context, Intent::End, StepOptions::default())?;
        self.context.world.set_absent(&[]);
        Ok(())
    }

    /// Returns the digest of the last update, for [`compare_updates`](Self::compare_updates).
    pub(crate) fn digest_of_update(&self) -> u64 {
        let state = self.state();
        state.updated.digest(state.next_step)
    }

    /// Compares the digests of the last update that all ranks have `said`. Collective over the
    /// world if they differ.
    ///
    /// # Errors
    /// [`Error::Disagreement`] on all ranks; [`Error::Comm`].
    pub(crate) fn compare_updates(&self, said: &[u64]) -> Result<(), Error> {
        let state = self.state();
        let last = LastUpdate { updated: &state.updated, finished: state.next_step };
        comparison::of_updates(&self.context, last, said)
    }

    /// Ends the world if an update has stopped in its middle: a checkpoint would have the values of
    /// no step.
    ///
    /// # Errors
    /// [`Error::Comm`] that ends the world.
    pub(crate) fn check_updated(&self) -> Result<(), Error> {
        let half_updated = self.state().half_updated;
        half_updated.map_or(Ok(()), |step| Err(self.end_half_updated(step)))
    }

    /// Waits for the state, if no step is under way, and the last update has ended. A step that was
    /// leaked is discarded: no caller can finish it.
    pub(super) fn state_between_steps(
        &self,
        operation: &'static str,
    ) -> Result<Locked<'_, State>, Error> {
        let mut state = self.state();
        if let Some(half) = state.half_updated {
            return Err(self.end_half_updated(half));
        }
        let Some(attempt) = &state.attempt else {
            // A panic may have left the machine where a step opens.
            state.machine.abort();
            return Ok(state);
        };
        let opened = attempt.opened;
        let leaked = match &state.step {
            Some(step) => format!("step {}", step.number),
            None => "an evaluation".to_owned(),
        };
        let what = format!("{leaked} was neither finished nor dropped");
        let error = self.context.misuse(operation, state.next_step, what);
        drop(state);
        self.abort_leaked_step(opened, &error);
        Err(error)
    }

    /// Ends the world, since parameters are neither those before the update of a step nor those
    /// after it.
    fn end_half_updated(&self, step: u64) -> Error {
        let what = "the update has not ended, by a panic or a device that failed: some parameters \
                    are updated and others are not";
        let error = self.context.misuse("optimizer step", step, what.to_owned());
        self.context.world.abort(&error.to_string());
        self.context.world.end().map_or(error, Error::Comm)
    }

    /// Checks that the shards are the model's own.
    ///
    /// # Errors
    /// [`Error::Misuse`] while averages are in their place.
    pub(crate) fn check_own_shards(
        &self,
        state: &State,
        operation: &'static str,
    ) -> Result<(), Error> {
        if state.own_shards.is_none() {
            return Ok(());
        }
        let what = "inside with_shards the model has averaged parameters, for evaluation: its own \
                    are trained and saved outside";
        Err(self.context.misuse(operation, state.next_step, what.to_owned()))
    }

    /// Warns, once, of gradients that an optimizer should have taken.
    fn warn_of_forgotten(&self, state: &State, next: u64) {
        let Some(step) = state.kept.take_forgotten() else { return };
        let rank = self.context.rank().index();
        hsdp_warnings::warn!(
            rank,
            step,
            next,
            "the gradients of a step were dropped, and no optimizer has updated the parameters with \
             them: pass them to an optimizer"
        );
    }
}

impl State {
    /// Exchanges headers where the next step would begin, and what follows from them. Returns the
    /// agreement of the ranks.
    fn open(
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
        };
        self.opening = Some(Opening { header, agreed: None });
        let driven = self.drive(context, "begin_step");
        let agreed = self.opening.take().and_then(|opening| opening.agreed);
        if let Err(error) = driven {
            self.machine.abort();
            return Err(error);
        }
        Ok(agreed.expect("the ranks have exchanged headers"))
    }

    /// Exchanges step headers.
    pub(super) fn exchange_headers(&mut self, context: &Context) -> Result<Conclusion, Error> {
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
    pub(super) fn compare_samples(&self, context: &Context) -> Result<Conclusion, Error> {
        let opening = self.opening.as_ref().expect("a step begins");
        header::compare_samples(context, &opening.header)?;
        Ok(Conclusion::Agreed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hsdp_comm::World;
    use hsdp_sharding::{ByteCount, Mesh, ModelSpec, Param, Plan, Unit};

    use super::*;
    use crate::options::ModelOptions;

    fn engine() -> Engine {
        let spec = ModelSpec::new().unit(Unit::new("a").param(Param::new("w", [4])));
        let options = ModelOptions::on(Mesh::SINGLE);
        let plan = Plan::new(spec, Mesh::SINGLE, options.plan_options()).expect("a plan");
        let context = Context::new(World::single(), Arc::new(plan), options).expect("a context");
        Engine::new(context, Vec::new())
    }

    #[test]
    fn a_panic_where_a_step_opens_leaves_nothing() {
        for call in [
            |engine: &Engine| engine.begin_step(StepOptions::microbatches(1)).map(drop),
            |engine: &Engine| engine.begin_evaluation().map(drop),
            |engine: &Engine| engine.end_run(),
        ] {
            let engine = engine();
            // A panic in the exchange of headers leaves the machine like this.
            engine.state().machine.begin(Begin::step(0, Some(1))).expect("no step is under way");
            call(&engine).expect("nothing is left");
        }
    }

    #[test]
    fn an_aborted_step_leaves_the_limit_of_the_order_that_stays() {
        let engine = engine();
        let begun = engine.begin_step(StepOptions::microbatches(1)).expect("a step");
        let Begun::Step(opened) = begun else { panic!("{begun:?}") };
        // The order that a forward has found needs as much.
        engine.context.full_pool.set_limit(ByteCount::ZERO);
        engine.abort_step(opened, None);
        assert_eq!(engine.context.full_pool.limit(), engine.context.plan.memory().full);
    }
}
