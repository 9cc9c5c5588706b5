//! docs/reliability.md, as far as it is a table: it lists the rows that run, and says what they are
//! told.

use std::collections::{BTreeMap, BTreeSet};

use hsdp_tests::support::sources;

use crate::rows::ROWS;
use crate::runner::{Happened, Row};

const PAGE: &str = "docs/reliability.md";

/// Where it lists what processes are put through: rows of the table may be here again.
const OF_PROCESSES: &str = "\n## Rows of processes\n";

/// Where the tests of those rows are listed.
const LISTS: [&str; 4] = [
    "comm/control/tests/processes/main.rs",
    "tests/tests/mpi/faults.rs",
    "tests/tests/mpi/killed_for_memory.rs",
    "tests/tests/mpi/starting.rs",
];

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

/// Checks that the page lists exactly the rows that run, under their names, and says of all others
/// what they wait for.
///
/// # Errors
/// Names the first row that is not so.
pub(crate) fn lists_the_rows() -> Result<(), String> {
    let listed = listed()?;
    let of_processes = rows(&of_processes()?.1)?;
    for number in NUMBERS {
        let cells = listed.get(&number).or_else(|| of_processes.get(&number));
        let cells = cells.ok_or_else(|| format!("{PAGE} has no row {number}"))?;
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
            None if cells.len() == 2 || !listed.contains_key(&number) => {}
            None => return Err(format!("{PAGE} lists row {number} as one that runs")),
        }
    }
    let unknown = listed.keys().find(|number| !NUMBERS.contains(number));
    unknown.map_or(Ok(()), |number| Err(format!("{PAGE} has a row {number}")))
}

/// Checks that the page lists exactly the tests that there are of processes, each in the row that
/// it is named for.
///
/// # Errors
/// Names those that are listed or exist alone.
pub(crate) fn lists_the_rows_of_processes() -> Result<(), String> {
    let mut listed = BTreeSet::new();
    for (number, cells) in rows(&of_processes()?.1)? {
        let names = cells.get(2).map(String::as_str).unwrap_or_default();
        let names: Vec<&str> = names.split(", ").map(|name| name.trim_matches('`')).collect();
        let is_of_row = |name: &&str| name.contains(&format!("::row_{number}_"));
        if let Some(name) = names.iter().find(|name| !is_of_row(name)) {
            return Err(format!("{PAGE}, row {number}: `{name}` is not named for it"));
        }
        listed.extend(names.into_iter().map(str::to_owned));
    }
    let mut there = BTreeSet::new();
    for list in LISTS {
        let text = read(list)?;
        let in_name = |letter: char| letter.is_ascii_alphanumeric() || "_:".contains(letter);
        let names = text.split(|letter| !in_name(letter));
        there.extend(names.filter(|name| name.contains("::row_")).map(str::to_owned));
    }
    if listed == there {
        return Ok(());
    }
    let alone: Vec<_> = listed.symmetric_difference(&there).collect();
    Err(format!("listed in {PAGE}, or tests, but not both: {alone:?}"))
}

fn read(path: &str) -> Result<String, String> {
    let text = std::fs::read_to_string(sources::root().join(path));
    text.map_err(|error| format!("{path}: {error}"))
}

/// The page without what it says of processes, and that.
fn of_processes() -> Result<(String, String), String> {
    let text = read(PAGE)?;
    let missing = || format!("{PAGE} has no{OF_PROCESSES}");
    let (before, rest) = text.split_once(OF_PROCESSES).ok_or_else(missing)?;
    let (own, after) = rest.split_once("\n## ").unwrap_or((rest, ""));
    Ok((format!("{before}\n{after}"), own.to_owned()))
}

/// The rows of all tables but that of processes.
fn listed() -> Result<Listed, String> {
    rows(&of_processes()?.0)
}

/// The rows of a text's tables that begin with a number.
fn rows(text: &str) -> Result<Listed, String> {
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
