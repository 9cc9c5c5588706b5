//! The value of an option of an optimizer.

use std::fmt::{self, Debug};

use hsdp_kernels::MomentumKind;
use serde_json::Value;

use crate::options::allowed::Allowed;

/// The value of an option.
pub enum Setting<'a> {
    /// The learning rate, which is finite in f32, and 0 or more. Checkpoints have it as
    /// `learning_rate` too, whatever its name.
    Rate(&'a mut f64),
    /// A number, and the numbers that are allowed.
    Number(&'a mut f64, Allowed),
    /// A number of times, each of which is allowed.
    Count(&'a mut usize),
    /// One of several ways, each of which is allowed. A checkpoint has the text of its `Debug`; the
    /// function takes the way of such a text, and returns whether it could.
    Choice(&'a dyn Debug, &'a mut dyn FnMut(&str) -> bool),
}

impl Debug for Setting<'_> {
    /// Writes the value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(value) | Self::Number(value, _) => write!(f, "{value:?}"),
            Self::Count(count) => write!(f, "{count:?}"),
            Self::Choice(value, _) => write!(f, "{value:?}"),
        }
    }
}

impl Setting<'_> {
    /// Returns the value of a number, and the numbers that are allowed.
    pub(super) fn number(&self) -> Option<(f64, Allowed)> {
        match self {
            Self::Rate(value) => Some((**value, Allowed::NotNegative)),
            Self::Number(value, allowed) => Some((**value, *allowed)),
            Self::Count(_) | Self::Choice(..) => None,
        }
    }

    /// Returns the value for a checkpoint.
    pub(super) fn json(&self) -> Value {
        match self {
            Self::Rate(value) | Self::Number(value, _) => Value::from(**value),
            Self::Count(count) => Value::from(**count),
            Self::Choice(value, _) => Value::from(format!("{value:?}")),
        }
    }

    /// Sets the value to that of a checkpoint, and returns whether it could.
    pub(super) fn set(self, saved: &Value) -> bool {
        match self {
            Self::Rate(value) | Self::Number(value, _) => {
                saved.as_f64().map(|saved| *value = saved).is_some()
            }
            Self::Count(count) => {
                let saved = saved.as_u64().and_then(|saved| usize::try_from(saved).ok());
                saved.map(|saved| *count = saved).is_some()
            }
            Self::Choice(_, take) => saved.as_str().is_some_and(take),
        }
    }
}

/// Lists an option that is one of `all`.
pub(super) fn choice<T: Copy + Debug>(
    see: &mut dyn FnMut(&'static str, Setting<'_>),
    name: &'static str,
    value: &mut T,
    all: &[T],
) {
    let now = *value;
    let mut take = |saved: &str| {
        let taken = all.iter().find(|it| format!("{it:?}") == saved);
        taken.map(|taken| *value = *taken).is_some()
    };
    see(name, Setting::Choice(&now, &mut take));
}

/// All kinds of momentum.
pub(super) const MOMENTUM_KINDS: [MomentumKind; 2] =
    [MomentumKind::Classic, MomentumKind::Nesterov];
