//! The state of an optimizer that goes into a checkpoint: its tensors, the ranks that have their
//! elements, and pairs of optimizers.

use std::borrow::Cow;
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_kernels::copy_past_caches;
use hsdp_sharding::{BufferId, ModelSpec, Param, ParamId};
use serde_json::json;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::problem::Problem;
use crate::persist::saved::SavedState;
use crate::state::context::ModelId;

/// An optimizer whose state goes into checkpoints.
///
/// Several optimizers of one model are one, as a pair or a triple: the state of each goes into the
/// same checkpoint. They keep different kinds of state.
pub trait Checkpointed: Sized + Send + Sync {
    /// Returns whether the optimizer was made for this model.
    fn is_of(&self, model: &ModelId) -> bool;

    /// Its kind, such as `adamw`: a checkpoint of another kind is refused. Its present options, and
    /// those with which it was made, which a load compares
    /// ([`OtherOptions`](crate::checkpoint::OtherOptions)). The number of updates of each parameter
    /// that it updates, by name; none if it does not count them.
    fn head(&self, spec: &ModelSpec) -> OptimizerHead;

    /// Returns the kinds of state that it keeps, such as `exp_avg`: letters, digits and `_`. No
    /// other optimizer of the same checkpoint has one of them.
    fn kinds(&self) -> Vec<&'static str>;

    /// Returns the tensors of its state, the same on all ranks; none before the first update.
    fn tensors(&self) -> Vec<StateTensor>;

    /// Returns the tensors that it would read from a checkpoint.
    fn expected(&self, saved: &SavedState<'_>) -> Expected;

    /// Returns elements that this rank has of a parameter's tensor of state: borrowed, or a copy.
    /// `None` if there is no such tensor.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if the state lies on a device that fails.
    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        kind: &str,
        parameter: ParamId,
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
        kind: &str,
        parameter: ParamId,
        start: usize,
        into: &mut [f32],
    ) -> Result<bool, Error> {
        let state = self.state(model, kind, parameter, start..start + into.len())?;
        Ok(state.map(|state| copy_past_caches(into, &state)).is_some())
    }

    /// Returns the values that it keeps of the model's [buffers](Param::buffer), such as averages:
    /// the same on all ranks, and at any time. The default returns none.
    fn buffer_states(&self) -> Vec<BufferState> {
        Vec::new()
    }

    /// Copies the values that it keeps of a buffer, as many as the buffer has elements. Returns
    /// `false` if it keeps none.
    fn copy_buffer_state(&self, state: BufferState, into: &mut [f32]) -> bool {
        let _ = (state, into);
        false
    }

    /// Returns a new optimizer with the state of a checkpoint, and with the same options, or those
    /// of the checkpoint that it takes. This one does not change.
    ///
    /// # Errors
    /// If the checkpoint cannot be read, or there is no memory for the state.
    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem>;
}

/// Between the kinds of two optimizers.
pub(crate) const AND: &str = "+";

/// Why an update by two optimizers of one kind has no checkpoint.
pub(crate) const ONE_OF_EACH_KIND: &str =
    "a checkpoint keeps the state of one of each kind, which may have groups";

/// The optimizers of one update: `(muon, adamw)`. Three are `((muon, adamw), ema)`.
///
/// The kinds of both make its kind, such as `muon+adamw`. Both were made for the same model,
/// and their kinds differ, because a checkpoint finds the owner of a tensor by the kind.
impl<A: Checkpointed, B: Checkpointed> Checkpointed for (A, B) {
    fn head(&self, spec: &ModelSpec) -> OptimizerHead {
        let [first, second] = [self.0.head(spec), self.1.head(spec)];
        // An optimizer that does not say with which options it was made has its present ones.
        let [one, other] = [&first, &second].map(|it| it.made_with.as_ref().unwrap_or(&it.options));
        OptimizerHead {
            made_with: Some(json!([one, other])),
            options: json!([first.options, second.options]),
            kind: [first.kind, second.kind].join(AND),
            updates: first.updates.into_iter().chain(second.updates).collect(),
            is_open: first.is_open || second.is_open,
        }
    }

    fn is_of(&self, model: &ModelId) -> bool {
        self.0.is_of(model) && self.1.is_of(model)
    }

    fn kinds(&self) -> Vec<&'static str> {
        [self.0.kinds(), self.1.kinds()].concat()
    }

    fn tensors(&self) -> Vec<StateTensor> {
        let mut tensors = self.0.tensors();
        tensors.extend(self.1.tensors());
        tensors
    }

    fn expected(&self, saved: &SavedState<'_>) -> Expected {
        let [mut all, other] = [self.0.expected(&saved.part(0)), self.1.expected(&saved.part(1))];
        all.tensors.extend(other.tensors);
        all.counted.extend(other.counted);
        all
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        kind: &str,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        match self.0.state(model, kind, parameter, range.clone())? {
            Some(state) => Ok(Some(state)),
            None => self.1.state(model, kind, parameter, range),
        }
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        kind: &str,
        parameter: ParamId,
        start: usize,
        into: &mut [f32],
    ) -> Result<bool, Error> {
        let is_first = self.0.copy_state(model, kind, parameter, start, &mut *into)?;
        Ok(is_first || self.1.copy_state(model, kind, parameter, start, into)?)
    }

    fn buffer_states(&self) -> Vec<BufferState> {
        [self.0.buffer_states(), self.1.buffer_states()].concat()
    }

    fn copy_buffer_state(&self, state: BufferState, into: &mut [f32]) -> bool {
        self.0.copy_buffer_state(state, into) || self.1.copy_buffer_state(state, into)
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        Ok((self.0.restored(model, &saved.part(0))?, self.1.restored(model, &saved.part(1))?))
    }
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

/// Values that an optimizer keeps of a buffer, f32: a tensor with the buffer's shape, which every
/// rank has. Its name in a checkpoint is `optimizer:<kind>:<buffer>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferState {
    /// The kind of state, such as `ema`.
    pub kind: &'static str,
    /// The buffer.
    pub buffer: BufferId,
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
    /// A number of elements; each rank has all of them.
    Whole(usize),
    /// A number of elements; one of the [updaters](hsdp_sharding::Plan::updaters) has all of them.
    Owned {
        /// The number.
        len: usize,
        /// Its index among the updaters.
        owner: usize,
    },
}

impl Spread {
    /// Returns the shape of the tensor for a parameter.
    pub(crate) fn shape(self, parameter: &Param) -> Vec<u64> {
        match self {
            Self::Elements => parameter.shape.iter().map(|size| *size as u64).collect(),
            Self::Blocks(block) => vec![parameter.numel().div_ceil(block) as u64],
            Self::Whole(len) | Self::Owned { len, .. } => vec![len as u64],
        }
    }

    /// Returns the elements of the tensor that belong to `range` of the parameter.
    pub(crate) fn range(self, range: Range<usize>) -> Range<usize> {
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
