//! docs/reliability.md, as far as it is a table: it lists the rows that run, and says what they are told.

use std::collections::BTreeMap;

use hsdp_tests::support::sources;

use crate::rows::ROWS;
use crate::runner::{Happened, Row};

const PAGE: &str = "docs/reliability.md";

/// The numbers that the longer list has.
const NUMBERS: std::ops::RangeInclusive<u32> = 1..=60;

/// A row of a table of the page: its number, and the other cells.
type Listed = BTreeMap<u32, Vec<String>>;

/// Checks that what happened is what the page says; `…` there stands for anything.
///
/// # Errors
/// If it is not, or the page does not list the row.
pub(crate) fn says_so(row: &Row, happened: Happened) -> Result<Happened, String> {
    let listed = listed()?;
    let cells = listed.get(&row.number);
    let says = cells.and_then(|cells| Some(cells.get(1)?.replace('`', ""))).unwrap_or_default();
    if fits(&says, &happened.told) {
        return Ok(happened);
    }
    let Row { number, .. } = row;
    Err(format!("{PAGE} says of row {number}: {says}\nand what happened is: {}", happened.told))
}

/// Checks that the page lists exactly the rows that run, under their names, and says of all others what they wait for.
///
/// # Errors
/// Names the first row that is not so.
pub(crate) fn lists_the_rows() -> Result<(), String> {
    let listed = listed()?;
    for number in NUMBERS {
        let cells = listed.get(&number).ok_or_else(|| format!("{PAGE} has no row {number}"))?;
        match ROWS.iter().find(|row| row.number == number) {
            Some(row) => {
                let expected = [row.fault.to_owned(), format!("`{}`", row.name())];
                let found =
                    [cells.first(), cells.get(2)].map(|cell| cell.cloned().unwrap_or_default());
                if found != expected {
                    return Err(format!(
                        "{PAGE}, row {number}: {found:?}, what runs is {expected:?}"
                    ));
                }
            }
            None if cells.len() == 2 => {}
            None => return Err(format!("{PAGE} lists row {number} as one that runs")),
        }
    }
    let unknown = listed.keys().find(|number| !NUMBERS.contains(number));
    unknown.map_or(Ok(()), |number| Err(format!("{PAGE} has a row {number}")))
}

/// The tables' rows that begin with a number.
fn listed() -> Result<Listed, String> {
    let text = std::fs::read_to_string(sources::root().join(PAGE));
    let text = text.map_err(|error| format!("{PAGE}: {error}"))?;
    let mut listed = Listed::new();
    for line in text.lines() {
        let cells = line.strip_prefix('|').and_then(|line| line.trim_end().strip_suffix('|'));
        let mut cells = cells.into_iter().flat_map(|cells| cells.split('|')).map(str::trim);
        let Some(Ok(number)) = cells.next().map(str::parse) else { continue };
        if listed.insert(number, cells.map(str::to_owned).collect()).is_some() {
            return Err(format!("{PAGE} has row {number} twice"));
        }
    }
    Ok(listed)
}

/// Whether `text` is `pattern`, in which `…` stands for anything.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('…');
    let Some(mut rest) = parts.next().and_then(|begin| text.strip_prefix(begin)) else {
        return false;
    };
    let Some(end) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(end)
}
