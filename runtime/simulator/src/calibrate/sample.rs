//! Rows of a large table with which a fit begins.

use std::collections::BTreeSet;

use crate::Time;

/// Maximum number of rows of a table that is fitted as a whole from the start: a fit predicts each
/// row some hundred times.
pub(super) const FEW: usize = 1000;

/// Rows of a sample that are spread over all predictions, and rows that depend most on each number.
const SPREAD: usize = 600;
const BY_NUMBER: usize = 50;

/// Returns the indices of a sample of rows, in order. They are evenly spread by their `predicted`
/// time, whatever their order in the table. For each number the sample also has the rows with the
/// largest derivative by it, which may be rare.
pub(super) fn of(predicted: &[Time], derivatives: &[Vec<f64>]) -> Vec<usize> {
    let mut by_time: Vec<usize> = (0..predicted.len()).collect();
    by_time.sort_by_key(|row| predicted[*row]);
    let last = predicted.len().saturating_sub(1);
    let mut sample: BTreeSet<usize> =
        (0..SPREAD).map(|it| by_time[it * last / (SPREAD - 1)]).collect();
    for column in derivatives {
        let mut by_slope: Vec<usize> = (0..column.len()).collect();
        by_slope.sort_by(|a, b| column[*b].abs().total_cmp(&column[*a].abs()));
        sample.extend(by_slope.into_iter().take(BY_NUMBER));
    }
    sample.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_all_times_and_the_rows_on_which_a_number_depends() {
        // Every hundredth row is slow, and three rows alone depend on the second number.
        let time = |row: u64| {
            Time::from_picoseconds(if row.is_multiple_of(100) { 1_000_000 + row } else { row })
        };
        let predicted: Vec<Time> = (0..10_000).map(time).collect();
        let mut rare = vec![0.0; 10_000];
        [17, 4711, 9998].into_iter().for_each(|row| rare[row] = -0.5);
        let sample = of(&predicted, &[vec![1.0; 10_000], rare]);
        assert!(sample.len() <= SPREAD + 2 * BY_NUMBER && sample.is_sorted());
        assert!([17, 4711, 9998].iter().all(|row| sample.contains(row)));
        let slow = sample.iter().filter(|row| row.is_multiple_of(100)).count();
        assert!((5..60).contains(&slow), "{slow}");
        let (least, most) = (predicted.iter().min(), predicted.iter().max());
        let times = || sample.iter().map(|row| &predicted[*row]);
        assert_eq!((times().min(), times().max()), (least, most));
    }
}
