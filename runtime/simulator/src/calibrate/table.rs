//! Tables as CSV, in limits.

use serde::de::DeserializeOwned;

use crate::{Error, Time};

/// The most rows of a table.
const ROWS: usize = 100_000;

/// Reads a table with a header, row by row, through `check`, which may refuse one.
pub(super) fn read<Raw: DeserializeOwned, Row>(
    text: &str,
    mut check: impl FnMut(Raw) -> Result<Row, String>,
) -> Result<Vec<Row>, Error> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
    let headers = reader.headers().map_err(|error| unreadable(&error))?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| unreadable(&error))?;
        let line = record.position().map_or(1, csv::Position::line);
        if rows.len() == ROWS {
            return Err(refused(line, format!("more than {ROWS} rows")));
        }
        let raw = record.deserialize(Some(&headers)).map_err(|error| unreadable(&error))?;
        rows.push(check(raw).map_err(|problem| refused(line, problem))?);
    }
    match rows.is_empty() {
        true => Err(refused(1, "no rows".into())),
        false => Ok(rows),
    }
}

/// A time in units of `unit` seconds; a problem if it is not above 0, or too long.
pub(super) fn time(value: f64, unit: f64, name: &str) -> Result<Time, String> {
    let time = Time::from_seconds(value * unit).filter(|time| *time > Time::ZERO);
    time.ok_or_else(|| format!("{name} is {value}: expected a time above 0 and below 213 days"))
}

/// A number of things, from 1 to `most`.
pub(super) fn count(value: u64, most: u64, name: &str) -> Result<usize, String> {
    let found = Some(value).filter(|value| (1..=most).contains(value));
    let found = found.and_then(|value| usize::try_from(value).ok());
    found.ok_or_else(|| format!("{name} is {value}: expected 1 to {most}"))
}

fn unreadable(error: &csv::Error) -> Error {
    let line = error.position().map_or(1, csv::Position::line);
    let problem = match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => match err.field() {
            Some(field) => format!("column {}: {}", field + 1, err.kind()),
            None => err.kind().to_string(),
        },
        _ => error.to_string(),
    };
    refused(line, problem)
}

fn refused(line: u64, problem: String) -> Error {
    Error::Table { line, problem: problem.split_whitespace().collect::<Vec<_>>().join(" ") }
}
