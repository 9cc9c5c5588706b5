//! The purpose of an operation: the part of its descriptor that the caller writes.

use std::fmt;

use hsdp_sharding::UnitId;
use serde::{Deserialize, Serialize};

use crate::{ModelLabel, Part};

/// The purpose of an operation: stage, step, microbatch and, where there are any, model, part of
/// the model and unit.
///
/// The members of an operation compare their tags, so two calls of the same shape that were swapped
/// on one rank are detected. Displayed as `unit 3, reduce, step 7, microbatch 0`. The first model
/// of a world is shown if it has a name, and a part if its number is not 0; the alternate form
/// (`{:#}`) always shows both.
///
/// ```
/// use hsdp_flight::{Stage, Tag};
/// use hsdp_sharding::UnitId;
///
/// let tag = Tag::new(Stage::Reduce).unit(UnitId::new(3)).step(7);
/// assert_eq!(tag.to_string(), "unit 3, reduce, step 7, microbatch 0");
/// assert_eq!(Tag::default().to_string(), "user, step 0, microbatch 0");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tag {
    /// The stage of the step.
    pub stage: Stage,
    /// Model of the operation, if it is one of a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelLabel>,
    /// Part of the model, if the operation is not of the model's own parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    /// The unit whose parameters or gradients are moved, if it is one unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<UnitId>,
    /// The optimizer step.
    pub step: u64,
    /// The microbatch within the step.
    pub microbatch: usize,
}

/// All fields of a tag, where a format has no names by which a missing field is seen.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Tag")]
pub(crate) struct WholeTag {
    unit: Option<UnitId>,
    stage: Stage,
    step: u64,
    microbatch: usize,
    model: Option<ModelLabel>,
    part: Option<Part>,
}

impl Tag {
    /// The tag of `stage`, in step 0 and microbatch 0, of no model and no unit.
    #[must_use]
    pub const fn new(stage: Stage) -> Self {
        Self { stage, model: None, part: None, unit: None, step: 0, microbatch: 0 }
    }

    /// Returns the tag as one of `model`.
    #[must_use]
    pub const fn model(self, model: ModelLabel) -> Self {
        Self { model: Some(model), ..self }
    }

    /// Returns the tag as one of `part`.
    #[must_use]
    pub const fn part(self, part: Part) -> Self {
        Self { part: Some(part), ..self }
    }

    /// The same, of `unit`.
    #[must_use]
    pub const fn unit(self, unit: UnitId) -> Self {
        Self { unit: Some(unit), ..self }
    }

    /// The same, in `step`.
    #[must_use]
    pub const fn step(self, step: u64) -> Self {
        Self { step, ..self }
    }

    /// The same, in `microbatch`.
    #[must_use]
    pub const fn microbatch(self, microbatch: usize) -> Self {
        Self { microbatch, ..self }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_full = f.alternate();
        if let Some(model) = self.model.filter(|it| in_full || *it != ModelLabel::FIRST) {
            write!(f, "{model}, ")?;
        }
        if let Some(part) = self.part.filter(|it| in_full || it.number > 0) {
            write!(f, "{part}, ")?;
        }
        if let Some(unit) = self.unit {
            write!(f, "unit {}, ", unit.index())?;
        }
        write!(f, "{}, step {}, microbatch {}", self.stage, self.step, self.microbatch)
    }
}

names! {
    /// The stage of a step that an operation belongs to.
    #[derive(Default)]
    Stage, "a stage" {
        /// Before the first step: comparing plans, initial values and replicas.
        Setup = "setup",
        /// The header that begins a step or a microbatch.
        Header = "header",
        /// Unsharding a unit.
        Gather = "gather",
        /// Reducing a unit's gradients over the shard group.
        Reduce = "reduce",
        /// Summing partials over the replicate group.
        AllReduce = "all_reduce",
        /// The agreement of all ranks before the optimizer, with norms and weights.
        Agreement = "agreement",
        /// Work on whole parameters: checkpoints, imports, exports, norms.
        Export = "export",
        /// The backward of a collective that users call: it never meets a forward.
        Backward = "backward",
        /// A batch of an evaluation, or its means.
        Evaluation = "evaluation",
        /// Anything that the runtime did not issue.
        #[default]
        User = "user",
        /// Exchanging matrices and sums in an update by an optimizer.
        Update = "update",
    }
}
