//! An update of a model by its optimizers: the checks before anything changes, and the pass.

use hsdp_comm::World;
use parking_lot::Mutex;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::model::updates::{Moved, Updates};
use crate::optimizer::assignment::Assignment;
use crate::optimizer::interface::{Selected, Update};
use crate::optimizer::pass::{Pass, UnitUpdate};
use crate::persist::checkpointed::ONE_OF_EACH_KIND;
use crate::state::context::Context;
use crate::state::control;
use crate::state::shard::Shard;
use crate::step::drive::EngineState;
use crate::step::gradients::{Gradients, Verdict};

impl ShardedModel {
    /// Updates this rank's shards by several optimizers in one pass, each for the parameters that
    /// its function selects, and counts the step as committed; or skips the step if the ranks
    /// agreed on that. Collective over the shard group if one of the optimizers
    /// [is](crate::Optimizer::is_collective), and otherwise not.
    ///
    /// ```
    /// use hsdp::prelude::*;
    /// # fn step(model: &mut ShardedModel, gradients: hsdp::Gradients) -> Result<(), hsdp::Error> {
    /// let mut sgd = Sgd::new(model, SgdOptions::default());
    /// let mut adamw = AdamW::new(model, AdamWOptions::default());
    /// let is_matrix = |param: &Param| param.shape.len() == 2;
    /// let the_rest = |param: &Param| param.shape.len() != 2;
    /// model.update_by(gradients, [(&mut sgd, is_matrix), (&mut adamw, the_rest)])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Before any parameter changes: [`Error::Options`] that names a trainable parameter which no
    /// optimizer selects, or more than one; [`Error::Misuse`] for an update on a device that is
    /// [measured](Gradients::measured), or clipped by [value](Gradients::clip_value) or by groups,
    /// and for two optimizers of one kind while [checkpoints](crate::checkpoint::Checkpoints::open)
    /// of the model are open; those of [`Gradients::check_model`], of
    /// [`Optimizer::check`](crate::Optimizer::check) and of
    /// [`Optimizer::prepare`](crate::Optimizer::prepare). [`Error::Device`](Error) if the model
    /// lies on a device that fails: some units are updated then, and others are not.
    pub fn update_by<const N: usize>(
        &mut self,
        gradients: Gradients,
        optimizers: [Selected<'_>; N],
    ) -> Result<Update, Error> {
        self.update_by_all(gradients, &mut { optimizers })
    }

    fn update_by_all(
        &mut self,
        mut gradients: Gradients,
        optimizers: &mut [Selected<'_>],
    ) -> Result<Update, Error> {
        gradients.grad_shards.taken();
        let context = &self.engine.context;
        let begin = || {
            gradients.check_model(self)?;
            let state = self.engine.enter("optimizer step", gradients.step)?;
            let kinds = optimizers.iter().map(|(optimizer, _)| optimizer.kind()).collect();
            let selects = optimizers.iter().map(|(_, has)| *has);
            Ok((state, Assignment::new(context, kinds, selects)?))
        };
        let (mut state, assignment) =
            jointly((waiting(context, optimizers), gradients.step), begin)?;
        let averages = self.updates.lock().averages.living();
        let pass =
            Pass { context, gradients: &gradients, assignment: &assignment, averages: &averages };
        pass.run((&mut state, &self.updates), optimizers)?;
        state.commit(&gradients.verdict);
        Ok(match gradients.verdict {
            Verdict::Apply => Update::Applied,
            Verdict::Skip(found) => Update::Skipped(found),
        })
    }
}

/// The world, if other ranks wait for this one in an update by these optimizers.
fn waiting<'a>(context: &'a Context, optimizers: &[Selected<'_>]) -> Option<&'a World> {
    let is_collective = optimizers.iter().any(|(optimizer, _)| optimizer.is_collective());
    is_collective.then_some(&context.world)
}

/// A part of an update before anything changes. A rank that fails in it tells the ranks that wait.
fn jointly<T>(
    (waiting, step): (Option<&World>, u64),
    part: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    match waiting {
        Some(world) => control::between_steps(world, step, part),
        None => part(),
    }
}

impl Pass<'_> {
    fn run(
        self,
        (state, updates): (&mut EngineState, &Mutex<Updates>),
        optimizers: &mut [Selected<'_>],
    ) -> Result<(), Error> {
        let room = state.updated.room();
        let lines = self.prepare((&state.shards, room), optimizers)?;
        updates.lock().moved = None;
        if self.gradients.verdict != Verdict::Apply {
            return Ok(());
        }
        state.begin_update(self.gradients, lines);
        for (index, (optimizer, _)) in optimizers.iter_mut().enumerate() {
            optimizer.begin(&self.updating(&state.shards, index));
        }
        let site = self.context.site("optimizer step", self.gradients.step);
        let mut moved = self.gradients.is_measured.then(|| Moved::new(self.context));
        for unit in self.context.plan.reductions().iter().copied() {
            let update = UnitUpdate {
                pass: self,
                unit,
                optimizers: &mut *optimizers,
                moved: moved.as_mut(),
            };
            let updated =
                state.shards[unit.index()].update(self.gradients.grad_shards.of(unit), update);
            updated.map_err(|error| site.device(error))?;
        }
        updates.lock().moved = moved;
        Ok(())
    }

    /// All that may fail before anything changes. Returns the lines of the options. A rank that
    /// fails where others wait for it tells them.
    fn prepare(
        self,
        (shards, mut lines): (&[Shard], String),
        optimizers: &mut [Selected<'_>],
    ) -> Result<String, Error> {
        let waiting = waiting(self.context, optimizers);
        let prepare = || {
            self.check_measured()?;
            self.check_clipped()?;
            self.check_kinds(optimizers)?;
            self.assignment.write(optimizers.len(), &mut lines);
            for (index, (optimizer, _)) in optimizers.iter_mut().enumerate() {
                optimizer.check(&self.updating(shards, index), &mut lines)?;
            }
            for average in self.averages {
                average.lock().write(&mut lines);
            }
            if self.gradients.verdict == Verdict::Apply {
                for (index, (optimizer, _)) in optimizers.iter_mut().enumerate() {
                    optimizer.prepare(&self.updating(shards, index))?;
                }
            }
            Ok(lines)
        };
        jointly((waiting, self.gradients.step), prepare)
    }

    /// Refuses two optimizers of one kind while the model has checkpoints that may save: they could
    /// not.
    fn check_kinds(self, optimizers: &[Selected<'_>]) -> Result<(), Error> {
        let mut kinds = optimizers.iter().enumerate();
        let twice = kinds.find_map(|(index, (optimizer, _))| {
            let kind = optimizer.kind()?;
            let is_same = |(other, _): &Selected<'_>| other.kind() == Some(kind);
            optimizers[..index].iter().any(is_same).then_some(kind)
        });
        let Some(kind) = twice.filter(|_| self.context.is_saved()) else { return Ok(()) };
        let what = format!(
            "two optimizers of the update are {kind}, and checkpoints of the model are open: \
             {ONE_OF_EACH_KIND}"
        );
        Err(self.context.misuse("optimizer step", self.gradients.step, what))
    }

    fn check_measured(self) -> Result<(), Error> {
        if !self.gradients.is_measured || !self.context.updates_on_device() {
            return Ok(());
        }
        let what = "an update on a device is not measured: do not call `Gradients::measured`";
        Err(self.context.misuse("optimizer step", self.gradients.step, what.to_owned()))
    }

    fn check_clipped(self) -> Result<(), Error> {
        if !self.gradients.is_clipped_apart() || !self.context.updates_on_device() {
            return Ok(());
        }
        let what = "an update on a device clips all gradients by one factor: do not clip by value, \
                    nor groups of parameters, or place the model on the host";
        Err(self.context.misuse("optimizer step", self.gradients.step, what.to_owned()))
    }
}
