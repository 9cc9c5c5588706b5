//! How exactly measurements determine the numbers that are fitted to them. SIMULATOR.md, "Calibration".

use super::least_squares::{Normal, Place, dot, squares};
use super::{Fitted, problem};
use crate::Error;

/// The largest relative standard error: a number with a larger one cannot be told from 0, since the variance of the residuals would be smaller without it.
const MOST: f64 = 1.0;
/// The least part of a column of derivatives that others do not explain. They are difference quotients, with errors of about a tenth of it.
const INDEPENDENT: f64 = 1e-3;
/// With it, columns that are sums of others have an inverse too, with a diagonal that is far beyond what is allowed.
const DAMPING: f64 = 1e-12;

/// The standard errors of numbers at the best place, relative to the numbers, since places are logarithms. They are infinite for numbers that others can
/// replace. There are `freedom` more measurements than numbers, of which rows that are alike count as one: repeated ones are no other evidence.
pub(super) fn standard_errors(
    derivatives: &[Vec<f64>],
    (_, residuals): &Place,
    freedom: usize,
) -> Vec<f64> {
    let all = (0..derivatives.len()).collect();
    let inverse = Normal::new(derivatives, residuals, all).inverse_diagonal(DAMPING);
    let variance = squares(residuals) / freedom as f64;
    let error = |(inverse, column): (f64, &Vec<f64>)| {
        let independent = 1.0 / (inverse * dot(column, column)).sqrt();
        if independent > INDEPENDENT { (variance * inverse).sqrt() } else { f64::INFINITY }
    };
    inverse.into_iter().zip(derivatives).map(error).collect()
}

/// Refuses numbers that the measurements do not determine.
pub(super) fn check(numbers: &[Fitted]) -> Result<(), Error> {
    let undetermined = numbers.iter().filter(|it| it.standard_error > MOST);
    let undetermined: Vec<_> =
        undetermined.map(|it| format!("{} ({it})", it.number.name)).collect();
    match undetermined.is_empty() {
        true => Ok(()),
        false => Err(problem(format!(
            "the measurements do not determine {}: they need to differ more",
            undetermined.join(" and ")
        ))),
    }
}
