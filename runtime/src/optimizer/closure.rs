//! Updates that a program writes down as closures.

use hsdp_kernels::cuda::CudaError;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::interface::{Optimizer, Update};
use crate::optimizer::run::{DeviceRun, Run};
use crate::optimizer::updating::Updating;
use crate::step::gradients::Gradients;

impl ShardedModel {
    /// Updates this rank's shards: calls `update` for each run of elements that has a gradient, in the plan's order of
    /// units, and counts the step as committed. Not collective.
    ///
    /// A long piece comes as several runs, one after the other, so that each run stays in the cache. An update must not depend on
    /// the places at which a piece is cut. If the ranks agreed to skip the step, `update` is not called.
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

    /// As [`update`](Self::update), for a model that is updated on a device: calls `update` once for each unit with a
    /// parameter that has a gradient, in the plan's order. Not collective, and waits for nothing.
    ///
    /// # Errors
    /// As [`update_by`](Self::update_by); [`Error::Misuse`] if the model is updated on the host; [`Error::Device`] with the error that
    /// `update` returned: some units are updated then, and others are not.
    pub fn update_on_device(
        &mut self,
        gradients: Gradients,
        update: impl FnMut(DeviceRun<'_>) -> Result<(), CudaError>,
    ) -> Result<Update, Error> {
        OnDevice(update).step(self, gradients)
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

    fn update_on_device(&mut self, _: DeviceRun<'_>) -> Result<(), CudaError> {
        unreachable!("`check` has refused it")
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
