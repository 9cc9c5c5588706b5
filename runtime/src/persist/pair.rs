//! Two optimizers of one model, as one for a checkpoint.

use std::borrow::Cow;
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_sharding::{ModelSpec, ParamId};
use serde_json::json;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::checkpointed::Checkpointed;
use crate::persist::problem::Problem;
use crate::persist::saved::SavedState;
use crate::persist::tensors::{Expected, StateTensor};
use crate::state::model_id::ModelId;

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
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        match self.0.state(model, of, range.clone())? {
            Some(state) => Ok(Some(state)),
            None => self.1.state(model, of, range),
        }
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        of: (&str, ParamId),
        (start, into): (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let is_first = self.0.copy_state(model, of, (start, &mut *into))?;
        Ok(is_first || self.1.copy_state(model, of, (start, into))?)
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        Ok((self.0.restored(model, &saved.part(0))?, self.1.restored(model, &saved.part(1))?))
    }
}
