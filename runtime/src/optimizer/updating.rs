//! An update, as the optimizers that take part in it see it.

use std::ops::Range;

use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_kernels::{divide_in_place, scaled_copy};
use hsdp_sharding::{ParamId, Piece, Plan, UnitId};

use crate::error::Error;
use crate::optimizer::assignment::Assignment;
use crate::optimizer::pieces::trained_pieces;
use crate::state::context::{Context, ErrorSite, ModelId};
use crate::state::shard::Shard;
use crate::state::store::Located;
use crate::step::gradients::{Gradients, Verdict};

/// The update in which an optimizer takes part, before it changes anything.
#[derive(Debug)]
pub struct Updating<'a> {
    pub(super) context: &'a Context,
    pub(super) gradients: &'a Gradients,
    pub(super) assignment: &'a Assignment,
    pub(super) shards: &'a [Shard],
    /// The index of the optimizer.
    pub(super) index: usize,
}

impl Updating<'_> {
    /// The plan of the model.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.context.plan
    }

    /// Whether the model is updated on a device.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        self.context.updates_on_device()
    }

    /// Whether this optimizer updates the parameter, in steps in which it has a gradient.
    ///
    /// # Panics
    /// If the model has no such parameter.
    #[must_use]
    pub fn has(&self, parameter: ParamId) -> bool {
        self.assignment.of(self.context, parameter) == self.index
    }

    /// Describes the optimizer that updates a trainable parameter.
    pub(super) fn optimizer_of(&self, parameter: ParamId) -> String {
        self.assignment.text_of(self.context, parameter)
    }

    /// Whether the parameter is updated now: it has a gradient, and the ranks agreed to apply it.
    ///
    /// # Panics
    /// If the model has no such parameter.
    #[must_use]
    pub fn updates(&self, parameter: ParamId) -> bool {
        let applies = *self.gradients.verdict() == Verdict::Apply;
        applies && self.has(parameter) && self.gradients.has_gradient(parameter)
    }

    /// Checks that an optimizer was made for this model.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it was not.
    pub fn check_owner(&self, owner: &ModelId) -> Result<(), Error> {
        if *owner == self.gradients.model {
            return Ok(());
        }
        Err(self.misuse("the optimizer was made for another model".to_owned()))
    }

    /// [`Gradients::clip_factor`], by which the update multiplies gradients first.
    #[must_use]
    pub fn clip(&self) -> f32 {
        self.gradients.clip_factor()
    }

    /// Copies elements of a parameter from this rank's shard of its unit's gradient, in f32,
    /// divided, and clipped except for [`clip`](Self::clip).
    pub(super) fn gradient(
        &self,
        parameter: ParamId,
        range: Range<usize>,
        into: &mut [f32],
    ) -> Result<(), Error> {
        let divisor = self.gradients.divisor;
        match self.gradients.grad_shards.of(parameter.unit) {
            Located::Host(values) => scaled_copy(into, &values[range], divisor),
            there @ Located::Device(_) => {
                there.copy_to(&self.site(), range.start, into)?;
                divide_in_place(into, divisor);
            }
        }
        if let Some(clip) = self.gradients.clip_of(self.context, parameter) {
            clip.apply(into);
        }
        Ok(())
    }

    /// This rank's shard of a unit's gradient on a device, and its divisor.
    ///
    /// # Panics
    /// If the gradient lies on the host.
    pub(super) fn gradient_on_device(&self, unit: UnitId) -> (&DeviceBuffer, f64) {
        (self.gradients.grad_shards.of(unit).there(), self.gradients.divisor)
    }

    /// Returns this update, for errors that name it.
    pub(super) fn site(&self) -> ErrorSite<'_> {
        self.context.site("optimizer step", self.gradients.step)
    }

    /// Elements of this rank's shard of a unit, in f32.
    pub(super) fn parameters(
        &self,
        unit: UnitId,
        range: Range<usize>,
        into: &mut [f32],
    ) -> Result<(), Error> {
        self.shards[unit.index()].copy_to(self.context, range.start, into)
    }

    /// The trained pieces of this rank's shards that this optimizer updates now, in the plan's order of units.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (UnitId, Piece)> {
        let pieces = |unit| trained_pieces(self.context, unit).map(move |piece| (unit, piece));
        let all = self.context.plan.reductions().iter().copied().flat_map(pieces);
        all.filter(|(unit, piece)| self.updates(ParamId { unit: *unit, index: piece.param }))
    }

    /// The error of an update that cannot be made.
    #[must_use]
    pub fn misuse(&self, what: String) -> Error {
        self.context.misuse("optimizer step", self.gradients.step, what)
    }
}
