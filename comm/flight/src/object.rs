//! The objects of a program that an operation may be of: a model, and a part of it. Members compare
//! them, so that the exchanges of two equal objects cannot meet.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
    PartKind, "a kind of part" {
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
