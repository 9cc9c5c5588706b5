//! The trait of optimizers, an update as optimizers see it before anything changes, and the
//! elements that they update at once.

use std::fmt::Write as _;
use std::ops::Range;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DeviceUpdate, Stream};
use hsdp_kernels::{divide_in_place, scaled_copy};
use hsdp_sharding::{Param, ParamId, Piece, Plan, Role, UnitId};

use crate::error::Error;
use crate::error::gradients::NonFiniteGradient;
use crate::model::ShardedModel;
use crate::options::digest;
use crate::state::context::{Context, ErrorSite, ModelId};
use crate::state::shard::Shard;
use crate::state::store::Located;
use crate::step::gradients::{Gradients, Verdict};

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
/// once, and then [`update`](Self::update) for each run of elements with a gradient. A model on a
/// device has a method of its own for it, `update_on_device`.
pub trait Optimizer {
    /// Updates this rank's shards, or skips the step if the ranks agreed on that. Collective over
    /// the world if [`is_collective`](Self::is_collective), and otherwise not.
    ///
    /// Parameters that got no gradient on any rank, and their state, do not change.
    ///
    /// # Errors
    /// Errors of [`ShardedModel::update_by`].
    fn step(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        let mut this = self;
        model.update_by(gradients, [(&mut this, &|_| true)])
    }

    /// Returns whether ranks exchange data in an update.
    fn is_collective(&self) -> bool {
        false
    }

    /// Returns the kind, such as `adamw`, of an optimizer that checkpoints can keep.
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

    /// Exchanges data with other ranks, before anything changes. It is called only if the gradients
    /// are applied.
    ///
    /// # Errors
    /// [`Error::Comm`], [`Error::OutOfMemory`] and [`Error::Device`]. The ranks give the update up
    /// then, but for those that have all results already. The next step fails on all ranks if some
    /// have made the update.
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
    ///
    /// # Panics
    /// If the optimizer does not implement it. Its [`check`](Self::check) refuses a model on a
    /// device, so that this is not called.
    #[cfg_attr(not(feature = "cuda"), doc(hidden))]
    fn update_on_device(&mut self, run: DeviceRun<'_>) -> Result<(), CudaError> {
        let _ = run;
        unreachable!("an optimizer for the host refuses a model on a device in its `check`")
    }

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

/// An optimizer of an update, and the test of whether it updates a parameter. The test may capture
/// variables, and has the same results on all ranks.
pub type Selected<'a> = (&'a mut dyn Optimizer, &'a dyn Fn(&Param) -> bool);

/// Consecutive elements of one parameter in this rank's shard, with their gradient: a piece of the
/// shard, or a part of a piece that stays in the cache while it is divided and updated.
#[derive(Debug)]
pub struct Run<'a> {
    /// The unit.
    pub unit: UnitId,
    /// The parameter of these elements, and their place in the unit's shard.
    pub piece: Piece,
    /// The f32 master parameters, `[piece.len]`, which the optimizer updates in place.
    pub parameters: &'a mut [f32],
    /// The gradient, `[piece.len]`.
    pub gradient: ClippedGradient<'a>,
}

/// The gradient of a [run](Run) in f32, divided and clipped.
///
/// The factor of [`Gradients::clip`](crate::Gradients::clip) is not applied in memory, which would
/// be a pass of its own: each element is multiplied by it when it is read.
#[derive(Clone, Copy, Debug)]
pub struct ClippedGradient<'a> {
    /// The elements, divided. The kernels of our own optimizers multiply them by `clip` first.
    pub(super) values: &'a [f32],
    /// [`Gradients::clip_factor`](crate::Gradients::clip_factor).
    pub(super) clip: f32,
}

impl<'a> ClippedGradient<'a> {
    /// Returns the elements, in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = f32> + DoubleEndedIterator + Clone + 'a {
        let Self { values, clip } = self;
        values.iter().map(move |value| value * clip)
    }
}

/// A unit of a model on a device, with its gradient, for one optimizer.
#[derive(Debug)]
pub struct DeviceRun<'a> {
    /// The unit.
    pub unit: UnitId,
    /// The stream on which the update is to run.
    pub stream: &'a Stream,
    /// The runs of elements that this optimizer updates, and that got a gradient in this step.
    pub pieces: Vec<Piece>,
    /// The f32 master parameters, the gradient, and its divisor.
    pub(super) update: DeviceUpdate<'a>,
    /// The factor of [`Gradients::clip`](crate::Gradients::clip), or 1.
    pub(super) clip: f32,
}

impl DeviceRun<'_> {
    /// Returns the f32 master parameters, the gradient and its divisor, and the factor of
    /// [`Gradients::clip`](crate::Gradients::clip), or 1. The buffers begin with elements `first`
    /// and `gradient_first` of the shard: 0, except for parameters that replicas divide. Here the
    /// kernel clips: it multiplies the divided gradient by the factor before anything else. The
    /// kernels of [`Stream`](hsdp_kernels::cuda::Stream) take the factor as `clip` of their step.
    #[must_use]
    pub fn update(&mut self) -> (DeviceUpdate<'_>, f32) {
        (reborrow(&mut self.update), self.clip)
    }
}

/// Borrows an update again, for one of several groups of its parameters.
pub(super) fn reborrow<'a>(update: &'a mut DeviceUpdate<'_>) -> DeviceUpdate<'a> {
    DeviceUpdate {
        parameters: &mut *update.parameters,
        first: update.first,
        rounded: update.rounded.as_deref_mut(),
        gradient: update.gradient,
        gradient_first: update.gradient_first,
        divisor: update.divisor,
    }
}

/// The update in which an optimizer takes part, before it changes anything.
#[derive(Debug)]
pub struct Updating<'a> {
    pub(super) context: &'a Context,
    pub(super) gradients: &'a Gradients,
    pub(super) assignment: &'a Assignment,
    pub(super) shards: &'a [Shard],
    /// Index of the optimizer.
    pub(super) index: usize,
}

impl Updating<'_> {
    /// Returns the plan of the model.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.context.plan
    }

    /// Returns whether the model is updated on a device.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        self.context.updates_on_device()
    }

    /// Returns whether this optimizer updates the parameter, in steps in which it has a gradient.
    ///
    /// # Panics
    /// If the model has no such parameter.
    #[must_use]
    pub fn has(&self, parameter: ParamId) -> bool {
        self.assignment.of(self.context, parameter) == self.index
    }

    /// Returns whether the parameter is updated now: it has a gradient, and the ranks agreed to
    /// apply it.
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

    /// Returns [`Gradients::clip_factor`], by which the update multiplies gradients first.
    pub(super) fn clip(&self) -> f32 {
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
                there.copy_to(self.site(), range.start, into)?;
                divide_in_place(into, divisor);
            }
        }
        if let Some(clip) = self.gradients.clip_of(self.context, parameter) {
            clip.apply(into);
        }
        Ok(())
    }

    /// Returns this rank's shard of a unit's gradient on a device, and its divisor.
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

    /// Copies elements of this rank's shard of a unit, in f32.
    pub(super) fn parameters(
        &self,
        unit: UnitId,
        range: Range<usize>,
        into: &mut [f32],
    ) -> Result<(), Error> {
        self.shards[unit.index()].copy_to(self.site(), range.start, into)
    }

    /// Returns the pieces of this rank's shards that this optimizer updates now, in the plan's
    /// order of units.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (UnitId, Piece)> {
        let pieces = |unit| self.context.updated_pieces(unit).map(move |piece| (unit, piece));
        let all = self.context.plan.reductions().iter().copied().flat_map(pieces);
        all.filter(|(unit, piece)| self.updates(ParamId { unit: *unit, index: piece.param }))
    }

    /// Returns the parts of these pieces in this rank's slices: each element that the optimizer
    /// updates is in a slice of one rank.
    pub(super) fn sliced_pieces(&self) -> impl Iterator<Item = (UnitId, Piece)> {
        let rank = self.context.rank();
        self.pieces().flat_map(move |(unit, piece)| {
            let slice = self.context.plan.slice(unit, rank);
            cut_at(piece, &slice)
                .filter(move |part| slice.contains(&part.shard_start))
                .map(move |part| (unit, part))
        })
    }

    /// Returns the error of an update that cannot be made.
    #[must_use]
    pub fn misuse(&self, what: String) -> Error {
        self.context.misuse("optimizer step", self.gradients.step, what)
    }
}

/// Cuts a piece where a range of the shard begins and ends.
pub(super) fn cut_at(piece: Piece, range: &Range<usize>) -> impl Iterator<Item = Piece> + use<> {
    let end = piece.shard_range().end;
    let [first, last] = [range.start, range.end].map(|at| at.clamp(piece.shard_start, end));
    let parts = [piece.shard_start..first, first..last, last..end];
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    parts.map(move |part| {
        part_of(piece, part.start - piece.shard_start..part.end - piece.shard_start)
    })
}

/// Returns a range of a piece, as a piece.
pub(super) fn part_of(piece: Piece, range: Range<usize>) -> Piece {
    Piece {
        param_start: piece.param_start + range.start,
        shard_start: piece.shard_start + range.start,
        len: range.len(),
        ..piece
    }
}

/// The optimizer of each parameter.
#[derive(Debug)]
pub(super) struct Assignment {
    /// Index of the optimizer of each parameter, by the parameter's number in the model, or
    /// [`NONE`].
    of: Vec<u16>,
    /// Kind of each optimizer that has one.
    kinds: Vec<Option<&'static str>>,
}

/// No optimizer: the parameter is frozen.
const NONE: u16 = u16::MAX;

impl Assignment {
    /// Gives each trainable parameter to the optimizer that selects it. `kinds` are those of the
    /// optimizers, and `selects` their tests of whether they update a parameter.
    ///
    /// # Errors
    /// [`Error::Options`] with the name of a parameter that no optimizer selects, or more than one.
    pub(super) fn new<'a>(
        context: &Context,
        kinds: Vec<Option<&'static str>>,
        selects: impl Iterator<Item = &'a dyn Fn(&Param) -> bool> + Clone,
    ) -> Result<Self, Error> {
        let mut of = vec![NONE; context.parameters()];
        for (id, param) in context.plan.spec().params() {
            if param.role == Role::Trainable {
                let selecting = selects.clone().enumerate().filter(|(_, has)| has(param));
                of[context.number_of(id)] = only(selecting.map(|it| it.0), &param.name)?;
            }
        }
        Ok(Self { of, kinds })
    }

    /// Writes a line for the comparison of ranks, if there are several optimizers.
    pub(super) fn write(&self, optimizers: usize, lines: &mut String) {
        if optimizers > 1 {
            let digest = digest::of_numbers(&self.of);
            writeln!(lines, "parameters of {optimizers} optimizers {digest:#018x}")
                .expect("a text");
        }
    }

    /// Returns the index of the optimizer of a parameter that is trained.
    pub(super) fn of(&self, context: &Context, parameter: ParamId) -> usize {
        usize::from(self.of[context.number_of(parameter)])
    }

    /// Describes the optimizer of a parameter that is trained.
    pub(super) fn text_of(&self, context: &Context, parameter: ParamId) -> String {
        let index = self.of(context, parameter);
        let kind = self.kinds[index].map_or_else(String::new, |kind| format!(" ({kind})"));
        format!("optimizer {index} of the update{kind}")
    }
}

/// Returns the only one of the optimizers that select the parameter of this name.
fn only(mut selecting: impl Iterator<Item = usize>, name: &str) -> Result<u16, Error> {
    let what = match (selecting.next(), selecting.next()) {
        (Some(one), None) => return Ok(u16::try_from(one).expect("a list of a few optimizers")),
        (Some(one), Some(other)) => {
            format!("parameter `{name}`: optimizers {one} and {other} of the update both select it")
        }
        (None, _) => format!("parameter `{name}`: no optimizer of the update selects it"),
    };
    Err(Error::Options { what })
}
