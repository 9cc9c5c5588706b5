//! The trait of optimizers.

use hsdp_kernels::cuda::CudaError;
use hsdp_sharding::Param;

use crate::error::Error;
use crate::error::gradients::NonFiniteGradient;
use crate::model::ShardedModel;
use crate::optimizer::run::{DeviceRun, Run};
use crate::optimizer::updating::Updating;
use crate::step::gradients::Gradients;

/// The result of an optimizer's step.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// The parameters were updated.
    Applied,
    /// All ranks left the parameters as they were, for this reason.
    Skipped(NonFiniteGradient),
}

/// An optimizer: alone by [`step`](Self::step), or beside others by [`ShardedModel::update_by`].
///
/// An update calls [`check`](Self::check), [`prepare`](Self::prepare) and [`begin`](Self::begin)
/// once, and then [`update`](Self::update), or [`update_on_device`](Self::update_on_device) for a
/// model that is updated on a device, for each run of elements with a gradient.
pub trait Optimizer {
    /// Updates this rank's shards, or skips the step if the ranks agreed on that. Collective over
    /// the shard group if [`is_collective`](Self::is_collective), and otherwise not.
    ///
    /// Parameters that got no gradient on any rank, and their state, do not change.
    ///
    /// # Errors
    /// Errors of [`ShardedModel::update_by`].
    fn step(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        let mut this = self;
        model.update_by(gradients, [(&mut this, |_| true)])
    }

    /// Whether ranks of the shard group exchange data in an update.
    fn is_collective(&self) -> bool {
        false
    }

    /// The kind, such as `adamw`, of an optimizer that checkpoints can keep.
    fn kind(&self) -> Option<&'static str> {
        None
    }

    /// Checks options, and makes the state of the parameters that this optimizer updates, before
    /// anything changes. Not collective.
    ///
    /// Writes a line for each option into `lines`, with its value. The ranks compare the lines when
    /// the next step begins, before a checkpoint is saved, and at the [end of the
    /// run](ShardedModel::end_run): ranks with another learning rate, for example, get
    /// [`Error::Disagreement`].
    ///
    /// # Errors
    /// The reason why there can be no update: [`Error::Options`] if an option has a value that
    /// would destroy the parameters, such as a learning rate that is NaN or below 0;
    /// [`Error::Misuse`] if the optimizer was made for another model, or cannot update on a device;
    /// [`Error::OutOfMemory`].
    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error>;

    /// Exchanges data with the ranks of the shard group, before anything changes. It is called only
    /// if the gradients are applied.
    ///
    /// # Errors
    /// [`Error::Comm`], [`Error::OutOfMemory`] and [`Error::Device`]. The ranks of the shard group
    /// give the update up then, but for those that have all results already. The next step fails on
    /// all ranks if some have made the update.
    fn prepare(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        let _ = updating;
        Ok(())
    }

    /// Begins an update that is certain: here an optimizer counts it.
    fn begin(&mut self, updating: &Updating<'_>) {
        let _ = updating;
    }

    /// Updates some elements on the host.
    fn update(&mut self, run: Run<'_>);

    /// Updates some elements of a unit on a device.
    ///
    /// # Errors
    /// Errors of the device.
    fn update_on_device(&mut self, run: DeviceRun<'_>) -> Result<(), CudaError>;

    /// Sets the learning rate for the next steps. Those of [groups](crate::Grouped::group) keep
    /// their ratios to it.
    fn set_learning_rate(&mut self, rate: f64);
}

impl<O: Optimizer + ?Sized> Optimizer for &mut O {
    fn step(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        (**self).step(model, gradients)
    }

    fn is_collective(&self) -> bool {
        (**self).is_collective()
    }

    fn kind(&self) -> Option<&'static str> {
        (**self).kind()
    }

    fn check(&mut self, updating: &Updating<'_>, lines: &mut String) -> Result<(), Error> {
        (**self).check(updating, lines)
    }

    fn prepare(&mut self, updating: &Updating<'_>) -> Result<(), Error> {
        (**self).prepare(updating)
    }

    fn begin(&mut self, updating: &Updating<'_>) {
        (**self).begin(updating);
    }

    fn update(&mut self, run: Run<'_>) {
        (**self).update(run);
    }

    fn update_on_device(&mut self, run: DeviceRun<'_>) -> Result<(), CudaError> {
        (**self).update_on_device(run)
    }

    fn set_learning_rate(&mut self, rate: f64) {
        (**self).set_learning_rate(rate);
    }
}

/// An optimizer of an update, and the test of whether it updates a parameter.
pub type Selected<'a> = (&'a mut dyn Optimizer, fn(&Param) -> bool);
