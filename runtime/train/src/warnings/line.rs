//! Formats a warning as a line of the file.

use std::time::{SystemTime, UNIX_EPOCH};

use hsdp_warnings::Warning;
use serde::Serialize;
use serde_json::{Map, Value};

/// Returns the line of JSON for a warning of `rank`. `left_out` others of its kind were left out
/// before it.
pub(super) fn line(warning: &Warning, rank: Option<usize>, left_out: u64) -> String {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let field = |(name, value): &(&str, String)| ((*name).to_owned(), value.as_str().into());
    let line = Line {
        unix_seconds: since_1970.as_secs_f64(),
        level: warning.level.as_str(),
        target: warning.target,
        rank,
        message: &warning.message,
        fields: warning.fields.iter().map(field).collect(),
        left_out,
    };
    serde_json::to_string(&line).unwrap_or_default()
}

/// Content of a line.
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
