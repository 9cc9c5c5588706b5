//! The method of an optimizer: the state that it keeps, and the update.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;

use hsdp_kernels::cuda::CudaError;
use hsdp_sharding::{Param, ParamId};

use crate::error::Error;
use crate::optimizer::covered::Covered;
use crate::optimizer::groups::Groups;
use crate::optimizer::run::{DeviceRun, Run};
use crate::optimizer::updating::Updating;
use crate::persist::checkpointed::{StateTensor, copy_part};
use crate::persist::problem::Problem;
use crate::persist::saved::StateSource;
use crate::state::context::{Context, ErrorSite};

/// A kind of optimizer with options `O`, whether it has state yet or not.
pub(super) trait Method<O>: Debug + Send + Sync {
    /// The kind, as errors and checkpoints name it.
    fn kind(&self) -> &'static str;

    fn traits(&self) -> Traits;

    /// The kinds of tensors that a checkpoint has of the state.
    fn kinds(&self, options: &O) -> &'static [&'static str];

    /// The tensors of a parameter.
    fn tensors(&self, options: &O, id: ParamId, param: &Param) -> Vec<StateTensor>;

    /// Checks that this method can update the parameters by groups.
    fn check(&self, groups: &Groups<O>) -> Result<(), Error> {
        let _ = groups;
        Ok(())
    }

    /// The state of the parameters that `has` selects, before their first update.
    fn zeros(
        &self,
        groups: &Groups<O>,
        site: ErrorSite<'_>,
        has: &dyn Fn(ParamId) -> bool,
    ) -> Result<Box<dyn Updates<O>>, Error>;
}

/// The properties of a kind of optimizer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    /// Whether a checkpoint has the number of updates.
    pub(super) counts: bool,
    /// Whether ranks of the shard group exchange data in an update.
    pub(super) is_collective: bool,
    /// Whether there is an update on a device.
    pub(super) on_device: bool,
}

/// State of parameters, which goes into checkpoints.
pub(super) trait Kept: Debug + Send + Sync {
    /// The parameters.
    fn covered(&self) -> &Covered;

    /// The parameters, to count their updates.
    fn covered_mut(&mut self) -> &mut Covered;

    /// Elements of a tensor of a parameter's state that this rank has: borrowed, or a copy. `None` if it has no such tensor.
    fn elements<'a>(
        &'a self,
        context: &Context,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error>;

    /// Copies elements of a tensor, from the `start`-th on, until `into` is full. `false` if there is no such tensor.
    fn copy_elements(
        &self,
        context: &Context,
        of: (&str, ParamId),
        (start, into): (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let elements = self.elements(context, of, start..start + into.len())?;
        Ok(elements.map(|elements| copy_part(&elements, 0, into)).is_some())
    }

    /// Reads this rank's part of the state from a checkpoint, or from earlier state.
    fn read(&mut self, context: &Context, source: &dyn StateSource) -> Result<(), Problem>;
}

/// Earlier state of an optimizer, which may be of other parameters.
pub(super) struct Earlier<'a> {
    pub(super) context: &'a Context,
    pub(super) kept: &'a dyn Kept,
}

impl StateSource for Earlier<'_> {
    fn read(
        &self,
        (kind, parameter): (&str, ParamId),
        start: usize,
        into: &mut [f32],
    ) -> Result<(), Problem> {
        if self.kept.covered().places.has(parameter) {
            self.kept.copy_elements(self.context, (kind, parameter), (start, into))?;
        }
        Ok(())
    }
}

/// The update of parameters, and of their state. [`Optimizer`](crate::Optimizer) says when each function is called.
pub(super) trait Updates<O>: Kept {
    /// Exchanges data with the ranks of the shard group, and changes no state.
    fn prepare(&mut self, groups: &Groups<O>, updating: &Updating<'_>) -> Result<(), Error> {
        let _ = (groups, updating);
        Ok(())
    }

    /// Begins an update that is certain, and that is counted.
    fn begin(&mut self, updating: &Updating<'_>) {
        let _ = updating;
    }

    /// Updates some elements on the host.
    fn update(&mut self, groups: &Groups<O>, run: Run<'_>);

    /// Updates some elements of a unit on a device.
    fn update_on_device(
        &mut self,
        groups: &Groups<O>,
        run: DeviceRun<'_>,
    ) -> Result<(), CudaError> {
        let _ = (groups, run);
        unreachable!("a method without an update on a device is refused there")
    }
}
