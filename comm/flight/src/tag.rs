//! The purpose of an operation: the part of its descriptor that the caller writes.

use std::fmt;

use hsdp_sharding::UnitId;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
    Stage {
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
        /// Summing the statistics of a batch over all ranks.
        Statistics = "statistics",
        /// Summing partials over the replicate group, each rank its own slice.
        ScatterSums = "scatter_sums",
        /// Gathering updated slices over the replicate group.
        GatherSlices = "gather_slices",
    }
}

/// The name of a model: 1 to 32 bytes of text without control characters and backquotes.
///
/// It is kept in place, so that a descriptor is copied into a ring without an allocation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelName {
    len: u8,
    /// The text, then zeros.
    bytes: [u8; Self::MOST_BYTES],
}

impl ModelName {
    /// Maximum number of bytes in a name.
    pub const MOST_BYTES: usize = 32;

    /// The name with this text; `None` if the text is empty, longer than
    /// [`MOST_BYTES`](Self::MOST_BYTES), or has a control character or a backquote.
    ///
    /// ```
    /// use hsdp_flight::ModelName;
    ///
    /// assert_eq!(ModelName::new("critic").expect("a name").as_str(), "critic");
    /// assert_eq!(ModelName::new("a\nb"), None);
    /// ```
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let refused = |it: char| it.is_control() || it == '`';
        if text.is_empty() || text.contains(refused) {
            return None;
        }
        let mut bytes = [0; Self::MOST_BYTES];
        bytes.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Some(Self { len: u8::try_from(text.len()).ok()?, bytes })
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl fmt::Debug for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for ModelName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for ModelName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::new(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is no name of a model")))
    }
}

/// A model of a world: its number, and its name if it has one. Displayed as ``model 1 `critic` ``.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModelLabel {
    /// Number in the order in which the models of the world were made, from 0.
    pub number: u32,
    /// Name that the program gave.
    pub name: Option<ModelName>,
}

impl ModelLabel {
    /// Label of the first model of a world, without a name.
    pub const FIRST: Self = Self { number: 0, name: None };
}

impl fmt::Display for ModelLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "model {}", self.number)?;
        self.name.map_or(Ok(()), |name| write!(f, " `{name}`"))
    }
}

names! {
    /// The kind of a [`Part`].
    PartKind {
        /// The averaged parameters that stand in for the model's own. The averages that exist are
        /// numbered from 1.
        Average = "average",
        /// The checkpoints in one directory, numbered from 0 in the order in which the model's
        /// directories were opened.
        Checkpoints = "checkpoints",
        /// An optimizer that exchanges data, numbered by the first parameter that it updates.
        Optimizer = "optimizer of parameter",
        /// The gradients of a step.
        Gradients = "gradients",
        /// The change of the parameters by the last update.
        Change = "change of parameters",
    }
}

/// The part of a model that an operation is of, where it is not of the model's own parameters.
/// Displayed as `average 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Part {
    /// Kind of the part.
    pub kind: PartKind,
    /// Number among the parts of its kind; 0 where there can be only one.
    pub number: u32,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            PartKind::Gradients | PartKind::Change => write!(f, "{}", self.kind),
            kind => write!(f, "{kind} {}", self.number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_short_and_has_one_line() {
        let long = "x".repeat(ModelName::MOST_BYTES);
        for text in ["a", "reward model 2", "критик", &long] {
            assert_eq!(ModelName::new(text).expect("a name").to_string(), text);
        }
        for text in ["", "a\nb", "\u{1b}[0m", "a`b", &format!("{long}x"), &"é".repeat(17)] {
            assert_eq!(ModelName::new(text), None, "{text:?}");
        }
    }

    #[test]
    fn labels_and_parts_are_read_as_they_were_written() {
        let label = ModelLabel { number: 3, name: ModelName::new("critic") };
        let part = Part { kind: PartKind::Average, number: 2 };
        let json = serde_json::to_string(&(label, part)).expect("numbers and names");
        assert_eq!(json, r#"[{"number":3,"name":"critic"},{"kind":"average","number":2}]"#);
        assert_eq!(serde_json::from_str::<(ModelLabel, Part)>(&json).expect("it"), (label, part));
        assert_eq!(
            (label.to_string(), part.to_string()),
            ("model 3 `critic`".into(), "average 2".into())
        );
        let refused = serde_json::from_str::<ModelLabel>(r#"{"number":0,"name":"a\nb"}"#);
        assert!(refused.unwrap_err().to_string().contains("is no name of a model"));
    }
}
