//! The state that an optimizer gives to a checkpoint, and takes from one.

use std::borrow::Cow;
use std::ops::Range;

use hsdp_checkpoint::{Generation, OptimizerHead, state_tensor};
use hsdp_kernels::copy_past_caches;
use hsdp_sharding::{ModelSpec, Param, ParamId, Role};

use super::fitting::{Fitting, Stateful};
use super::options::SavedOptions;
use super::together::Problem;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::state::context::Context;
use crate::state::model_id::ModelId;

/// An optimizer whose state goes into checkpoints.
///
/// Several optimizers of one model are one, as a pair or a triple: the state of each goes into the
/// same checkpoint. They keep different kinds of state.
pub trait Checkpointed: Sized + Send + Sync {
    /// Whether the optimizer was made for this model.
    fn is_of(&self, model: &ModelId) -> bool;

    /// Its kind, such as `adamw`: a checkpoint of another kind is refused. Its present options, and
    /// those with which it was made, which a load compares ([`OtherOptions`](super::OtherOptions)).
    /// The number of updates of each parameter that it updates, by name; none if it does not count
    /// them.
    fn head(&self, spec: &ModelSpec) -> OptimizerHead;

    /// Returns the kinds of state that it keeps, such as `exp_avg`: letters, digits and `_`. No
    /// other optimizer of the same checkpoint has one of them.
    fn kinds(&self) -> Vec<&'static str>;

    /// The tensors of its state, the same on all ranks; none before the first update.
    fn tensors(&self) -> Vec<StateTensor>;

    /// The tensors that it would read from a checkpoint.
    fn expected(&self, saved: &SavedState<'_>) -> Expected;

    /// Elements of a tensor of its state, of a parameter, that this rank has: borrowed, or a copy.
    /// `None` if it has no such tensor.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if the state lies on a device that fails.
    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error>;

    /// Copies elements of a tensor of its state, from the `start`-th on, until `into` is full.
    /// `false` if it has no such tensor. Training waits for this copy where a checkpoint is saved
    /// in the background.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    fn copy_state(
        &self,
        model: &ShardedModel,
        of: (&str, ParamId),
        (start, into): (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let state = self.state(model, of, start..start + into.len())?;
        Ok(state.map(|state| copy_part(&state, (0, into))).is_some())
    }

    /// Returns a new optimizer with the state of a checkpoint, and with the same options, or those
    /// of the checkpoint that it takes. This one does not change.
    ///
    /// # Errors
    /// If the checkpoint cannot be read, or there is no memory for the state.
    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem>;
}

/// Copies elements, from the `from`-th on, until `into` is full.
pub(crate) fn copy_part(all: &[f32], (from, into): (usize, &mut [f32])) {
    copy_past_caches(into, &all[from..from + into.len()]);
}

/// A tensor of an optimizer's state, f32. Its name in a checkpoint is
/// `optimizer:<kind>:<parameter>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// The kind of state, such as `exp_avg`.
    pub kind: &'static str,
    /// The parameter.
    pub parameter: ParamId,
    /// The relation of its elements to those of the parameter.
    pub spread: Spread,
}

/// The relation of the elements of a tensor of state to those of its parameter, and so to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// An element for each of the parameter: the tensor has its shape, and each rank of a shard
    /// group has a part.
    Elements,
    /// An element for each block of this number of elements of the parameter, which is cut between
    /// blocks only.
    Blocks(usize),
    /// This number of elements, all of which each rank of the shard group has.
    Whole(usize),
    /// This number of elements, all of which one rank of the shard group has.
    Owned {
        /// The number.
        len: usize,
        /// The rank's index in the shard group.
        owner: usize,
    },
}

impl Spread {
    /// The shape of the tensor, for a parameter.
    pub(super) fn shape(self, parameter: &Param) -> Vec<u64> {
        match self {
            Self::Elements => parameter.shape.iter().map(|size| *size as u64).collect(),
            Self::Blocks(block) => vec![parameter.numel().div_ceil(block) as u64],
            Self::Whole(len) | Self::Owned { len, .. } => vec![len as u64],
        }
    }

    /// The elements that a rank has of which `range` of the parameter decides what it writes.
    pub(super) fn range(self, range: Range<usize>) -> Range<usize> {
        match self {
            Self::Elements => range,
            Self::Blocks(block) => range.start.div_ceil(block)..range.end.div_ceil(block),
            Self::Whole(len) | Self::Owned { len, .. } => 0..len,
        }
    }
}

/// The part of a checkpoint that an optimizer expects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The tensors.
    pub tensors: Vec<StateTensor>,
    /// The parameters whose updates are counted.
    pub counted: Vec<ParamId>,
}

/// The state of optimizers in a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct SavedState<'a> {
    pub(super) context: &'a Context,
    pub(super) generation: &'a Generation,
    /// Whose state it is.
    pub(super) whose: Whose,
    /// The options that the optimizer takes.
    pub(crate) options: SavedOptions<'a>,
    /// Parts that fit, if only these are taken.
    pub(super) fitting: Option<&'a Fitting>,
}

/// The optimizers to which the state in a checkpoint belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// One optimizer updates all trainable parameters.
    One,
    /// Each parameter has the state of one of several optimizers.
    Several,
}

impl SavedState<'_> {
    /// Returns the same state for one optimizer of a pair: that of each parameter belongs to one of
    /// several.
    pub(super) fn part(self, index: usize) -> Self {
        Self { whose: Whose::Several, options: self.options.part(index), ..self }
    }

    /// Returns the parameters that have such state which is [taken](Self::takes_state), in the order
    /// of the model: all trainable ones, if one optimizer updates them all, and there is any.
    #[must_use]
    pub fn parameters_with(&self, kinds: &[&str]) -> Vec<ParamId> {
        let tensors = &self.generation.manifest().tensors;
        let has = |id, name: &str| {
            let mut kinds = kinds.iter();
            self.takes_state(id)
                && kinds.any(|kind| tensors.contains_key(&state_tensor(kind, name)))
        };
        let (all, with): (Vec<_>, Vec<_>) =
            self.trainable().map(|(id, param)| (id, has(id, &param.name).then_some(id))).unzip();
        match self.whose {
            Whose::One if with.iter().any(Option::is_some) => all,
            _ => with.into_iter().flatten().collect(),
        }
    }

    /// Returns the parameters whose updates are counted, and [taken](Self::takes_state), and that
    /// have no state but averages, in the order of the model.
    #[must_use]
    pub fn counted_without_state(&self) -> Vec<ParamId> {
        let stateful = Stateful::of(self.generation.manifest());
        let without = self
            .trainable()
            .filter(|(id, param)| self.takes_state(*id) && stateful.only_counts(&param.name));
        without.map(|(id, _)| id).collect()
    }

    fn trainable(&self) -> impl Iterator<Item = (ParamId, &Param)> {
        let params = self.context.plan.spec().params();
        params.filter(|(_, param)| param.role == Role::Trainable)
    }

    /// A parameter of the model.
    ///
    /// # Panics
    /// If the model has no such parameter.
    #[must_use]
    pub fn parameter(&self, parameter: ParamId) -> &Param {
        &self.context.plan.spec()[parameter]
    }

    /// Returns whether the state of a parameter is taken. Otherwise it begins anew, where only what
    /// fits is taken ([`OtherParameters::TakeFitting`](super::OtherParameters::TakeFitting)).
    #[must_use]
    pub fn takes_state(&self, parameter: ParamId) -> bool {
        self.fitting.is_none_or(|fitting| fitting.takes_state(parameter))
    }

    /// Returns whether the next update decides which optimizer gets the parameters without state. It
    /// does if only the part that fits is taken, and if the checkpoint was saved after such a load
    /// and before any update.
    pub(crate) fn is_open(&self) -> bool {
        let head = self.generation.manifest().optimizer.as_ref();
        self.fitting.is_some() || head.is_some_and(|head| head.is_open)
    }

    /// Reads elements of a parameter as it is after the load, which are `own` in the model before.
    pub(crate) fn read_parameter(
        &self,
        parameter: ParamId,
        start: usize,
        own: impl FnOnce(&mut [f32]) -> Result<(), Error>,
        into: &mut [f32],
    ) -> Result<(), Problem> {
        if self.fitting.is_some_and(|fitting| fitting.lacks(parameter)) {
            return Ok(own(into)?);
        }
        let name = &self.context.plan.spec()[parameter].name;
        Ok(self.generation.read(name, start as u64, into)?)
    }

    /// Returns the number of updates of a parameter; 0 if its state is not taken.
    #[must_use]
    pub fn updates(&self, parameter: ParamId) -> u64 {
        if !self.takes_state(parameter) {
            return 0;
        }
        let head = self.generation.manifest().optimizer.as_ref();
        let name = &self.context.plan.spec()[parameter].name;
        let counted = head.and_then(|head| head.updates.get(name));
        counted.copied().unwrap_or(0)
    }

    /// Reads elements of a tensor, from the `start`-th on, until `into` is full. Leaves `into` as
    /// it is if the state of the parameter is not [taken](Self::takes_state).
    ///
    /// # Errors
    /// If the checkpoint has no such tensor, or is damaged.
    pub fn read(
        &self,
        (kind, parameter): (&str, ParamId),
        start: usize,
        into: &mut [f32],
    ) -> Result<(), Problem> {
        if !self.takes_state(parameter) {
            return Ok(());
        }
        let name = state_tensor(kind, &self.context.plan.spec()[parameter].name);
        Ok(self.generation.read(&name, start as u64, into)?)
    }
}

/// State of optimizers, from which an optimizer reads its own.
pub(crate) trait Source {
    /// Reads elements of a tensor of state, from the `start`-th on, until `into` is full. Leaves
    /// `into` as it is if the source has no such state.
    fn read(&self, of: (&str, ParamId), start: usize, into: &mut [f32]) -> Result<(), Problem>;
}

impl Source for SavedState<'_> {
    fn read(&self, of: (&str, ParamId), start: usize, into: &mut [f32]) -> Result<(), Problem> {
        self.read(of, start, into)
    }
}
