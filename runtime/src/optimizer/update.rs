//! An update of a model by its optimizers: the checks before anything changes, and one pass over
//! this rank's shards, in which each parameter is updated by its optimizer. On the host the pass
//! goes run by run. On a device it issues one or two launches for each unit and optimizer, and does
//! not wait.

use std::sync::Arc;

use hsdp_comm::World;
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DeviceUpdate};
use hsdp_kernels::{FusedUpdate, UPDATE_BLOCK, ValuesMut, update_in_blocks};
use hsdp_sharding::{ParamId, Piece, UnitId};
use parking_lot::Mutex;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::model::updates::{Average, Moved, Updates};
use crate::optimizer::interface::{
    Assignment, ClippedGradient, DeviceRun, Optimizer, Run, Selected, Update, Updating, cut_at,
    part_of,
};
use crate::persist::checkpointed::ONE_OF_EACH_KIND;
use crate::state::context::Context;
use crate::state::control;
use crate::state::model_device::ModelDevice;
use crate::state::shard::{Shard, ShardUpdate};
use crate::step::drive::EngineState;
use crate::step::gradients::{Gradients, Verdict};

impl ShardedModel {
    /// Updates this rank's shards by several optimizers in one pass, each for the parameters that
    /// its function selects, and counts the step as committed; or skips the step if the ranks
    /// agreed on that. Collective over the world if one of the optimizers
    /// [is](crate::Optimizer::is_collective), and otherwise not.
    ///
    /// With [`StateOver::World`](crate::StateOver::World) it issues the gathers of updated slices,
    /// and does not wait for them. All ranks make the update, and an error in its middle ends the
    /// world.
    ///
    /// ```
    /// use hsdp::prelude::*;
    /// # fn step(model: &mut ShardedModel, gradients: hsdp::Gradients) -> Result<(), hsdp::Error> {
    /// let mut sgd = Sgd::new(model, SgdOptions::default());
    /// let mut adamw = AdamW::new(model, AdamWOptions::default());
    /// let heads = ["policy", "value"];
    /// let is_head = |param: &Param| heads.contains(&param.name.as_str());
    /// model.update_by(gradients, [(&mut sgd, &is_head), (&mut adamw, &|it| !is_head(it))])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Before any parameter changes: [`Error::Options`] that names a trainable parameter which no
    /// optimizer selects, or more than one; [`Error::Misuse`] for gradients of another model or of
    /// an earlier step, for an update on a device that is [measured](Gradients::measured) or
    /// clipped by [value](Gradients::clip_value) or by groups, and for two optimizers of one kind
    /// while [checkpoints](crate::checkpoint::Checkpoints::open) of the model are open; those of
    /// [`Optimizer::check`](crate::Optimizer::check) and of
    /// [`Optimizer::prepare`](crate::Optimizer::prepare). [`Error::Device`](Error) if the model
    /// lies on a device that fails: some units are updated then, and others are not.
    pub fn update_by<const N: usize>(
        &mut self,
        mut gradients: Gradients,
        mut optimizers: [Selected<'_>; N],
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
        let waiting = waiting(context, &optimizers);
        let (mut state, assignment) = jointly(waiting, gradients.step, begin)?;
        let averages = self.updates.lock().averages.living();
        let pass = UpdatePass {
            context,
            gradients: &gradients,
            assignment: &assignment,
            averages: &averages,
        };
        pass.run(&mut state, &self.updates, &mut optimizers)?;
        state.commit(&gradients.verdict);
        Ok(match gradients.verdict {
            Verdict::Apply => Update::Applied,
            Verdict::Skip(found) => Update::Skipped(found),
        })
    }

    /// Updates this rank's shards: calls `update` for each run of elements that has a gradient, in
    /// the [order of updates](crate::Plan::update_order), and counts the step as committed. Not
    /// collective, except with [`StateOver::World`](crate::StateOver::World): then slices are
    /// gathered over the replicas, for which it does not wait.
    ///
    /// A long piece comes as several runs, one after the other, so that each run stays in the
    /// cache. An update must not depend on the places at which a piece is cut. If the ranks agreed
    /// to skip the step, `update` is not called.
    ///
    /// # Errors
    /// As [`update_by`](Self::update_by); [`Error::Misuse`] if the model is updated on a device.
    pub fn update(
        &mut self,
        gradients: Gradients,
        update: impl FnMut(Run<'_>),
    ) -> Result<Update, Error> {
        OnHost(update).step(self, gradients)
    }

    /// Updates a model on a device as [`update`](Self::update) does on the host: calls `update`
    /// once for each unit with a parameter that has a gradient, in the plan's order of updates.
    /// Collective as `update` is, and waits for nothing.
    ///
    /// # Errors
    /// As [`update_by`](Self::update_by); [`Error::Misuse`] if the model is updated on the host;
    /// [`Error::Device`] with the error that `update` returned: some units are updated then, and
    /// others are not.
    #[cfg_attr(not(feature = "cuda"), doc(hidden))]
    pub fn update_on_device(
        &mut self,
        gradients: Gradients,
        update: impl FnMut(DeviceRun<'_>) -> Result<(), CudaError>,
    ) -> Result<Update, Error> {
        OnDevice(update).step(self, gradients)
    }
}

/// Returns the world, if other ranks wait for this one in an update by these optimizers, or for its
/// slices.
fn waiting<'a>(context: &'a Context, optimizers: &[Selected<'_>]) -> Option<&'a World> {
    let is_collective = optimizers.iter().any(|(optimizer, _)| optimizer.is_collective());
    (is_collective || context.plan.divides_state()).then_some(&context.world)
}

/// Runs a part of an update before anything changes. A rank that fails notifies the ranks that
/// wait.
fn jointly<T>(
    waiting: Option<&World>,
    step: u64,
    part: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    match waiting {
        Some(world) => control::between_steps(world, step, part),
        None => part(),
    }
}

/// An update of all shards of this rank.
#[derive(Clone, Copy)]
struct UpdatePass<'a> {
    context: &'a Context,
    gradients: &'a Gradients,
    assignment: &'a Assignment,
    averages: &'a [Arc<Mutex<Average>>],
}

impl<'a> UpdatePass<'a> {
    /// Returns the update as an optimizer sees it.
    fn updating<'b>(self, shards: &'b [Shard], index: usize) -> Updating<'b>
    where
        'a: 'b,
    {
        let Self { context, gradients, assignment, .. } = self;
        Updating { context, gradients, assignment, shards, index }
    }

    /// Moves the averages of some elements on, to the parameters after the update.
    fn average(self, unit: UnitId, piece: Piece, parameters: &[f32]) {
        for average in self.averages {
            average.lock().update(unit, piece, parameters);
        }
    }

    fn run(
        self,
        state: &mut EngineState,
        updates: &Mutex<Updates>,
        optimizers: &mut [Selected<'_>],
    ) -> Result<(), Error> {
        let room = state.updated.room();
        let lines = self.prepare(&state.shards, room, optimizers)?;
        updates.lock().moved = None;
        if self.gradients.verdict != Verdict::Apply {
            return Ok(());
        }
        state.begin_update(self.context, self.gradients, lines);
        for (index, (optimizer, _)) in optimizers.iter_mut().enumerate() {
            optimizer.begin(&self.updating(&state.shards, index));
        }
        let site = self.context.site("optimizer step", self.gradients.step);
        let mut moved = self.gradients.is_measured.then(|| Moved::new(self.context));
        for unit in state.updates() {
            let update = UnitUpdate {
                pass: self,
                unit,
                optimizers: &mut *optimizers,
                moved: moved.as_mut(),
            };
            let sums = self.gradients.grad_shards.of(unit);
            let updated =
                state.shards[unit.index()].update(sums, self.context.updated(unit), update);
            updated.map_err(|error| self.failed(site.device(error)))?;
            state.share_updated(self.context, unit).map_err(|error| self.failed(error))?;
        }
        for average in self.averages {
            average.lock().update_buffers(state.buffers.all_committed());
        }
        updates.lock().moved = moved;
        Ok(())
    }

    /// Ends the world if an update stops in its middle, and others wait for slices of this rank.
    fn failed(self, error: Error) -> Error {
        if self.context.plan.divides_state() {
            self.context.world.abort(&error.to_string());
        }
        error
    }

    /// Does all that may fail before anything changes, and returns the lines of the options. A rank
    /// that fails notifies the ranks that wait.
    fn prepare(
        self,
        shards: &[Shard],
        mut lines: String,
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
        jointly(waiting, self.gradients.step, prepare)
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

/// An update of one unit by its optimizers.
struct UnitUpdate<'a, 'b, 'c> {
    pass: UpdatePass<'a>,
    unit: UnitId,
    optimizers: &'b mut [Selected<'c>],
    moved: Option<&'b mut Moved>,
}

impl ShardUpdate for UnitUpdate<'_, '_, '_> {
    fn on_host(
        self,
        first: usize,
        master: &mut [f32],
        mut rounded: Option<ValuesMut<'_>>,
        sums: &[f32],
    ) {
        let Self { pass, unit, optimizers, mut moved } = self;
        let counted = match moved {
            Some(_) => pass.context.plan.slice(unit, pass.context.rank()),
            None => 0..0,
        };
        let pieces = pass.context.updated_pieces(unit);
        for piece in pieces.flat_map(|piece| cut_at(piece, &counted)) {
            let range = piece.shard_start - first..piece.shard_start - first + piece.len;
            let parameter = ParamId { unit, index: piece.param };
            if !pass.gradients.has_gradient(parameter) {
                pass.average(unit, piece, &master[range]);
                continue;
            }
            let (optimizer, _) = &mut optimizers[pass.assignment.of(pass.context, parameter)];
            let fused = FusedUpdate {
                parameters: &mut master[range.clone()],
                rounded: rounded.as_mut().map(|all| all.reborrow().slice(range.clone())),
                gradient: &sums[range],
                divisor: pass.gradients.divisor,
            };
            let clip = pass.gradients.clip_factor();
            let number = pass.context.number_of(parameter);
            let clipped_apart = pass.gradients.clip_of(pass.context, parameter);
            update_in_blocks(fused, |block, parameters, gradient| {
                let piece = part_of(piece, block);
                let mut on_stack;
                let gradient = match clipped_apart {
                    None => gradient,
                    Some(clip) => {
                        on_stack = [0.0; UPDATE_BLOCK];
                        let clipped = &mut on_stack[..gradient.len()];
                        clipped.copy_from_slice(gradient);
                        clip.apply(clipped);
                        clipped
                    }
                };
                let gradient = ClippedGradient { values: gradient, clip };
                let mut update = |parameters: &mut [f32]| {
                    optimizer.update(Run { unit, piece, parameters, gradient });
                };
                match &mut moved {
                    Some(moved) if counted.contains(&piece.shard_start) => {
                        moved.measure(number, parameters, update)
                    }
                    _ => update(parameters),
                }
                pass.average(unit, piece, parameters);
            });
        }
    }

    fn on_device(
        self,
        device: &ModelDevice,
        first: usize,
        master: &mut DeviceBuffer,
        mut rounded: Option<&mut DeviceBuffer>,
        sums: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let Self { pass, unit, optimizers, .. } = self;
        let UpdatePass { context, gradients, averages, .. } = pass;
        let stream = &*device.stream;
        let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); optimizers.len()];
        for piece in context.updated_pieces(unit) {
            let parameter = ParamId { unit, index: piece.param };
            if gradients.has_gradient(parameter) {
                pieces[pass.assignment.of(context, parameter)].push(piece);
            }
        }
        for ((optimizer, _), pieces) in optimizers.iter_mut().zip(pieces) {
            if pieces.is_empty() {
                continue;
            }
            let update = DeviceUpdate {
                parameters: &mut *master,
                first,
                rounded: rounded.as_deref_mut(),
                gradient: sums,
                gradient_first: 0,
                divisor: gradients.divisor,
            };
            let clip = gradients.clip_factor();
            optimizer.update_on_device(DeviceRun { unit, stream, update, pieces, clip })?;
        }
        if averages.is_empty() {
            return Ok(());
        }
        let pieces: Vec<Piece> = context.updated_pieces(unit).collect();
        averages.iter().try_for_each(|average| {
            average.lock().update_on_device(unit, stream, &pieces, master, first)
        })
    }
}

/// An update on the host, without options.
struct OnHost<F>(F);

impl<F: FnMut(Run<'_>)> Optimizer for OnHost<F> {
    fn check(&mut self, updating: &Updating<'_>, _: &mut String) -> Result<(), Error> {
        if !updating.is_on_device() {
            return Ok(());
        }
        let what = "the shards of this model are updated on a device: call `update_on_device`";
        Err(updating.misuse(what.to_owned()))
    }

    fn update(&mut self, run: Run<'_>) {
        (self.0)(run);
    }

    fn set_learning_rate(&mut self, _: f64) {}
}

/// An update on a device, without options.
struct OnDevice<F>(F);

impl<F: FnMut(DeviceRun<'_>) -> Result<(), CudaError>> Optimizer for OnDevice<F> {
    fn check(&mut self, updating: &Updating<'_>, _: &mut String) -> Result<(), Error> {
        if updating.is_on_device() {
            return Ok(());
        }
        Err(updating.misuse("this model is updated on the host".to_owned()))
    }

    fn update(&mut self, _: Run<'_>) {
        unreachable!("`check` has refused it")
    }

    fn update_on_device(&mut self, run: DeviceRun<'_>) -> Result<(), CudaError> {
        (self.0)(run)
    }

    fn set_learning_rate(&mut self, _: f64) {}
}
