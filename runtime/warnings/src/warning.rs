//! Formats one warning as text.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use crate::line::cut;

/// Maximum number of characters in a message or a field, so that a line stays readable even if a
/// peer has sent a long text.
const MOST_CHARACTERS: usize = 1000;

/// A warning. Its texts are shortened to one line each.
#[derive(Debug)]
pub struct Warning {
    /// Level, WARN or ERROR.
    pub level: Level,
    /// Module that emitted it.
    pub target: &'static str,
    /// Message without the fields.
    pub message: String,
    /// Fields in the order of the source, by name.
    pub fields: Vec<(&'static str, String)>,
}

impl Warning {
    /// Returns a warning without a message and fields.
    #[doc(hidden)]
    #[must_use]
    pub fn new(level: Level, target: &'static str) -> Self {
        Self { level, target, message: String::new(), fields: Vec::new() }
    }

    /// Returns the warning of an event.
    #[must_use]
    pub fn of(event: &Event<'_>) -> Self {
        let metadata = event.metadata();
        let mut warning = Self::new(*metadata.level(), metadata.target());
        event.record(&mut warning);
        if warning.message.is_empty() {
            warning.message = metadata.name().to_owned();
        }
        warning
    }

    /// Returns the text, such as `warning: the disk is full (free: 0, path: out)`.
    #[must_use]
    pub fn text(&self) -> String {
        let word = if self.level == Level::ERROR { "error" } else { "warning" };
        let fields: Vec<String> =
            self.fields.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        match fields.as_slice() {
            [] => format!("{word}: {}", self.message),
            fields => format!("{word}: {} ({})", self.message, fields.join(", ")),
        }
    }

    /// Adds a field, or the message if `name` is `message`.
    #[doc(hidden)]
    pub fn add(&mut self, name: &'static str, value: &dyn fmt::Display) {
        let text = cut(value, MOST_CHARACTERS);
        match name {
            "message" => self.message = text,
            name => self.fields.push((name, text)),
        }
    }
}

impl Visit for Warning {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field.name(), &value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field.name(), &format_args!("{value:?}"));
    }
}
