//! Updates of shards that lie on a device: one or two launches for each unit, and no wait.

use std::fmt::Display;

use hsdp_kernels::Values;
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DeviceUpdate, PieceOfStep, Stream};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{DType, Piece, UnitId};

use crate::engine::device::{ModelDevice, read_f32};
use crate::engine::fabric::Fabric;
use crate::engine::shard::Shard;
use crate::engine::sums::Sums;
use crate::error::Error;
use crate::gradients::{Gradients, Verdict};
use crate::model::ShardedModel;
use crate::optimizer::{Update, pieces_with_gradient, take, update_of};

/// A unit of a model on a device, with its gradient.
#[derive(Debug)]
pub struct DeviceRun<'a> {
    /// The unit.
    pub unit: UnitId,
    /// The stream on which the update is to run.
    pub stream: &'a Stream,
    /// The f32 master parameters, the gradient, and its divisor. An optimizer's state is as long as the gradient.
    pub update: DeviceUpdate<'a>,
    /// The runs of elements that are trained and got a gradient in this step.
    pub pieces: Vec<Piece>,
    /// The factor of [`Gradients::clip`], or 1. The update multiplies the gradient by it before anything else.
    pub clip: f32,
}

impl ShardedModel {
    /// Whether this rank's part of the model lies on a device.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        self.engine.fabric.device.is_some()
    }

    /// Whether this rank's part of the model is updated on a device: it lies there, and none of it is offloaded.
    #[must_use]
    pub fn updates_on_device(&self) -> bool {
        self.engine.fabric.updates_on_device()
    }

    /// As [`update`](Self::update), for a model that is updated on a device: calls `update` once for each unit with a
    /// trainable parameter, in the plan's order. Not collective, and waits for nothing.
    ///
    /// # Errors
    /// Those of [`Gradients::check_model`], before anything is changed; [`Error::Misuse`] if the model is updated on
    /// the host; [`Error::Device`] with the error that `update` returned: some units are updated then, and others are
    /// not.
    pub fn update_on_device(
        &mut self,
        gradients: Gradients,
        update: impl FnMut(DeviceRun<'_>) -> Result<(), CudaError>,
    ) -> Result<Update, Error> {
        self.update_on_device_as("", gradients, update)
    }

    /// As [`update_on_device`](Self::update_on_device), by an optimizer with these options, as in [`update_as`](Self::update_as).
    ///
    /// # Errors
    /// As [`update_on_device`](Self::update_on_device).
    pub fn update_on_device_as(
        &mut self,
        options: impl Display,
        mut gradients: Gradients,
        mut update: impl FnMut(DeviceRun<'_>) -> Result<(), CudaError>,
    ) -> Result<Update, Error> {
        take(&mut gradients, self, self.id())?;
        let (fabric, step) = (&self.engine.fabric, gradients.step);
        let Some(device) = fabric.device.as_ref().filter(|device| device.updates_there()) else {
            let what = "this model is updated on the host".to_owned();
            return Err(fabric.misuse("optimizer step", step, what));
        };
        let mut state = self.engine.enter("optimizer step", gradients.step)?;
        state.begin_update(&gradients, &options);
        if gradients.verdict == Verdict::Apply {
            for unit in fabric.plan.reductions().iter().copied() {
                let shard = (unit, &mut state.shards[unit.index()]);
                let updated = update_unit((fabric, device), shard, &gradients, &mut update);
                updated.map_err(|error| fabric.device_error("optimizer step", step, error))?;
            }
        }
        state.commit();
        Ok(update_of(gradients.verdict))
    }
}

fn update_unit(
    (fabric, device): (&Fabric, &ModelDevice),
    (unit, shard): (UnitId, &mut Shard),
    gradients: &Gradients,
    update: &mut dyn FnMut(DeviceRun<'_>) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let sums = &gradients.grad_shards[unit.index()];
    let (Shard::Device(shard), Sums::Device(sums)) = (shard, sums) else {
        unreachable!("a model on a device has its shards and sums there");
    };
    let present = &gradients.grad_shards.present[unit.index()];
    let pieces: Vec<Piece> = pieces_with_gradient(fabric, unit, present).collect();
    let (parameters, rounded) = shard.exclusive(device)?;
    let (gradient, divisor, clip) = (sums.values(), gradients.divisor, gradients.clip);
    let fused = DeviceUpdate { parameters, rounded, gradient, divisor };
    update(DeviceRun { unit, stream: device.stream(), update: fused, pieces, clip })
}

/// The pieces for a kernel: each with the number of its update.
pub(super) fn pieces_of_step<'a>(
    pieces: impl Iterator<Item = &'a Piece>,
    number: impl Fn(&Piece) -> u64,
) -> Vec<PieceOfStep> {
    let piece = |piece: &Piece| PieceOfStep { range: piece.shard_range(), step: number(piece) };
    pieces.map(piece).collect()
}

/// The same update, for one of several groups of its parameters.
pub(super) fn reborrow<'a>(update: &'a mut DeviceUpdate<'_>) -> DeviceUpdate<'a> {
    DeviceUpdate {
        parameters: &mut *update.parameters,
        rounded: update.rounded.as_deref_mut(),
        gradient: update.gradient,
        divisor: update.divisor,
    }
}

/// One kind of state, by unit: zeros when it is first used.
#[derive(Debug, Default)]
pub(super) struct DeviceState(Vec<Option<DeviceBuffer>>);

impl DeviceState {
    /// Makes the state of all units of a model, where it does not exist yet. This happens before any update, so that a
    /// device without memory for it leaves the model as it was.
    pub(super) fn make(&mut self, model: &ShardedModel, step: u64) -> Result<(), Error> {
        let fabric = &model.engine.fabric;
        let Some(device) = fabric.device.as_ref().filter(|device| device.updates_there()) else {
            return Ok(());
        };
        for unit in fabric.plan.reductions().iter().copied() {
            let of_unit = (unit, fabric.plan.layout(unit).trainable().shard_len);
            let made = self.of(device.stream(), of_unit).map(drop);
            made.map_err(|error| fabric.device_error("optimizer step", step, error))?;
        }
        Ok(())
    }

    /// The state of a unit, `[len]`, f32.
    pub(super) fn of(
        &mut self,
        stream: &Stream,
        (unit, len): (UnitId, usize),
    ) -> Result<&mut DeviceBuffer, CudaError> {
        if self.0.len() <= unit.index() {
            self.0.resize_with(unit.index() + 1, || None);
        }
        let state = &mut self.0[unit.index()];
        if state.is_none() {
            let _optimizer = memory::scope(Category::Optimizer);
            let mut zeros = DeviceBuffer::new(stream.device(), DType::F32, len, "optimizer state")?;
            zeros.fill(stream, 0)?;
            *state = Some(zeros);
        }
        Ok(state.as_mut().expect("it was just made"))
    }

    /// A copy of the state of a unit on the host; zeros where the state does not exist yet. Waits for the copy.
    pub(super) fn to_host(&self, model: &ShardedModel, unit: UnitId) -> Result<Vec<f32>, Error> {
        let fabric = &model.engine.fabric;
        match self.0.get(unit.index()).and_then(Option::as_ref) {
            None => Ok(hsdp_kernels::zeros(fabric.plan.layout(unit).trainable().shard_len)?),
            Some(state) => read_f32(fabric, state)
                .map_err(|error| fabric.device_error("saving", model.committed_steps(), error)),
        }
    }

    /// Copies the state of a unit, from the `from`-th element on, to the host. Waits for the copy.
    pub(super) fn copy_to(
        &self,
        model: &ShardedModel,
        (unit, from): (UnitId, usize),
        into: &mut [f32],
    ) -> Result<(), Error> {
        let fabric = &model.engine.fabric;
        let state = self.0.get(unit.index()).and_then(Option::as_ref);
        let (Some(state), Some(device)) = (state, &fabric.device) else {
            into.fill(0.0);
            return Ok(());
        };
        let read = state.read_back_into((device.stream(), device.patience()), from, into);
        read.map_err(|error| fabric.device_error("saving", model.committed_steps(), error))
    }

    /// Copies the state of all units to the device.
    pub(super) fn from_host(model: &ShardedModel, state: &[Vec<f32>]) -> Result<Self, Error> {
        let (fabric, mut made) = (&model.engine.fabric, Self::default());
        made.make(model, model.committed_steps())?;
        let Some(device) = &fabric.device else { return Ok(made) };
        for (unit, values) in made.0.iter_mut().zip(state) {
            let Some(unit) = unit else { continue };
            unit.write(device.stream(), Values::F32(values))
                .map_err(|error| fabric.device_error("loading", model.committed_steps(), error))?;
        }
        Ok(made)
    }
}
