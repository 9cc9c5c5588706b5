//! One warning as text.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use crate::stderr::cut;

/// The most characters of a message or a field. A line stays readable, whatever a peer has sent.
const MOST_CHARACTERS: usize = 1000;

/// An event, with its texts cut to one line each.
#[derive(Debug)]
pub(super) struct Warning {
    level: Level,
    target: &'static str,
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Warning {
    pub(super) fn of(event: &Event<'_>) -> Self {
        let metadata = event.metadata();
        let (level, target) = (*metadata.level(), metadata.target());
        let mut warning = Self { level, target, message: String::new(), fields: Vec::new() };
        event.record(&mut warning);
        if warning.message.is_empty() {
            warning.message = metadata.name().to_owned();
        }
        warning
    }

    /// `warning: the disk is full (free: 0, path: out)`
    pub(super) fn text(&self) -> String {
        let word = if self.level == Level::ERROR { "error" } else { "warning" };
        let fields: Vec<String> =
            self.fields.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        match fields.as_slice() {
            [] => format!("{word}: {}", self.message),
            fields => format!("{word}: {} ({})", self.message, fields.join(", ")),
        }
    }

    /// The line of JSON of the file.
    pub(super) fn line(&self, (rank, left_out): (Option<usize>, u64)) -> String {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let field = |(name, value): &(&str, String)| ((*name).to_owned(), value.as_str().into());
        let line = Line {
            unix_seconds: since_1970.as_secs_f64(),
            level: self.level.as_str(),
            target: self.target,
            rank,
            message: &self.message,
            fields: self.fields.iter().map(field).collect(),
            left_out,
        };
        serde_json::to_string(&line).unwrap_or_default()
    }

    fn add(&mut self, field: &Field, value: &dyn fmt::Display) {
        let text = cut(value, MOST_CHARACTERS);
        match field.name() {
            "message" => self.message = text,
            name => self.fields.push((name, text)),
        }
    }
}

impl Visit for Warning {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, &value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, &format_args!("{value:?}"));
    }
}

/// A line of the file.
#[derive(Debug, Serialize)]
struct Line<'a> {
    unix_seconds: f64,
    level: &'a str,
    target: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<usize>,
    message: &'a str,
    fields: Map<String, Value>,
    left_out: u64,
}
