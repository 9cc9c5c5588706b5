//! The measurements of a fit.

use std::collections::BTreeSet;

use super::problem;
use crate::{Error, Time};

/// First words of the source of a number that a fit found.
pub(crate) const FITTED: &str = "fitted to ";

/// Measured times of a table.
#[derive(Debug)]
pub struct Measurements<'a, R> {
    /// The name of the table, for the sources of numbers that are fitted to it.
    pub table: &'a str,
    /// The measured things, each with its time.
    pub rows: &'a [(R, Time)],
}

/// So many different rows are needed for each number. With one for each, all residuals are 0, and say nothing about the errors of numbers.
const ROWS_BY_NUMBER: usize = 2;

impl<R> Measurements<'_, R> {
    /// The number of rows that differ. Rows with one `predicted` time count once: they tell a fit the same.
    ///
    /// # Errors
    /// [`Error::Fit`] if it is too small for so many numbers, or if a time is 0.
    pub(super) fn different(&self, numbers: usize, predicted: &[Time]) -> Result<usize, Error> {
        if let Some(row) = self.rows.iter().position(|(_, time)| *time == Time::ZERO) {
            return Err(problem(format!("measurement {row} is a time of 0")));
        }
        let different = predicted.iter().collect::<BTreeSet<_>>().len();
        let needed = ROWS_BY_NUMBER * numbers;
        match different < needed {
            true => Err(problem(format!(
                "{} measurements, of which {different} differ, cannot fit {numbers} numbers: these need {needed} that differ",
                self.rows.len()
            ))),
            false => Ok(different),
        }
    }

    /// The source of a number that is fitted to them.
    pub(super) fn source(&self) -> String {
        format!("{FITTED}{} rows of {}", self.rows.len(), self.table)
    }
}
