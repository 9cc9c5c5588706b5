//! The Adafactor update in pieces, for parameters whose elements lie on several ranks.
//!
//! A parameter of at least two dims is a stack of matrices, the last two dims. Its variance is
//! estimated from a moment for each row and one for each column. A rank holds *runs* of consecutive
//! elements, which may begin and end anywhere. The steps of an update:
//!
//! 1. [`add_squares`] for each run; then the sums are added up over ranks, in f64.
//! 2. [`average_sums`] for the moments of rows and of columns.
//! 3. [`squared_update`] for each run, with a [`Factored`] estimate; then the sums are added up
//!    over ranks, like those of the squares of the parameter's elements.
//! 4. [`adafactor`] for each run.
//!
//! A parameter of fewer dims has a second moment for each element: [`average_squares`] takes the
//! place of 1 and 2, and [`Variance::Each`] that of the estimate.
//!
//! Sources: Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost",
//! arXiv 1804.04235; the formulas are those of `torch.optim.Adafactor`, which differs from the
//! paper in its use of the learning rate and of the first epsilon.

use std::ops::Range;

use smallvec::SmallVec;

use crate::inspect::sum_of_squares;
use crate::round::nearest_f32;
use crate::simd::vectorized;

/// The number of elements whose update is computed before it is used.
const BLOCK: usize = 256;

/// The parameters of one Adafactor update. The factors that follow from them are computed in f64
/// and rounded to f32 once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorStep {
    /// The largest relative size of a step, and the rate of the weight decay.
    pub learning_rate: f64,
    /// The power of the step's number that is the weight of the new squares: -0.8 in PyTorch.
    pub beta2_decay: f64,
    /// The least root of a variance, and the least mean of the moments of rows: 2^-23 in PyTorch.
    pub epsilon1: f64,
    /// The least root mean square of a parameter that counts: 1e-3 in PyTorch.
    pub epsilon2: f64,
    /// The root mean square from which an update is scaled down: 1 in PyTorch, where it is `d`.
    pub threshold: f64,
    /// The weight decay; a parameter is multiplied by 1 - `learning_rate` * `weight_decay`.
    pub weight_decay: f64,
    /// The number of this update, from 1.
    pub step: u64,
    /// The factor by which gradients are multiplied first; 1 leaves them unchanged.
    pub clip: f32,
}

/// The place of a run of consecutive elements in its parameter, a stack of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixRun {
    /// The first element of the run, in the parameter.
    pub start: usize,
    /// The rows of each matrix.
    pub rows: usize,
    /// The columns of each matrix.
    pub columns: usize,
}

/// Sums over a whole parameter, on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterSums {
    /// The number of its elements.
    pub elements: usize,
    /// The sum of the squares of its elements, before this update.
    pub squares: f64,
    /// The sum of [`squared_update`].
    pub squared_update: f64,
}

/// The estimate of a variance, from the moments of a whole parameter.
#[derive(Debug)]
pub struct Factored<'a> {
    row_moments: &'a [f32],
    column_moments: &'a [f32],
    /// The mean of the moments of each matrix's rows, but at least epsilon1.
    means: SmallVec<[f32; 1]>,
    /// The rows of each matrix.
    rows: usize,
    /// The columns of each matrix.
    columns: usize,
    least: f32,
}

/// The variances of the elements of a run.
#[derive(Debug, Clone, Copy)]
pub enum Variance<'a> {
    /// Factors of a parameter, and the index of the run's first element in it.
    Factored(&'a Factored<'a>, usize),
    /// The second moment of each element of the run, and the least variance.
    Each(&'a [f32], f32),
}

impl AdafactorStep {
    /// The weights of the old moment and of the new squares.
    fn weights(&self) -> [f32; 2] {
        assert!(self.step > 0, "adafactor: steps are counted from 1");
        let take = (self.step as f64).powf(self.beta2_decay);
        [nearest_f32(1.0 - take), nearest_f32(take)]
    }

    fn least_variance(&self) -> f32 {
        nearest_f32(self.epsilon1 * self.epsilon1)
    }

    /// `(1 - learning_rate * weight_decay, rate)`, where the rate is the factor of the update.
    fn factors(&self, sums: &ParameterSums) -> (f32, f32) {
        let root_mean = |squares: f64| (squares / sums.elements as f64).sqrt();
        let relative = self.learning_rate.min(1.0 / (self.step as f64).sqrt());
        let alpha = self.epsilon2.max(root_mean(sums.squares)) * relative;
        let scale = (root_mean(sums.squared_update) / self.threshold).max(1.0);
        let keep = nearest_f32(1.0 - self.learning_rate * self.weight_decay);
        (keep, nearest_f32(alpha / scale))
    }

    /// The variances of a run of a parameter of fewer than two dims, from the second moment of each
    /// element.
    #[must_use]
    pub fn each<'a>(&self, second_moment: &'a [f32]) -> Variance<'a> {
        Variance::Each(second_moment, self.least_variance())
    }
}

/// Adds the squares of `clip * gradient`, in f64, to the sums of the rows and of the columns of its
/// elements. The sums are those of all matrices of the parameter, `[matrices * rows]` and
/// `[matrices * columns]`.
///
/// # Panics
///
/// If the run does not lie within the sums, or a matrix has no elements.
pub fn add_squares(run: MatrixRun, gradient: &[f32], clip: f32, [rows, columns]: [&mut [f64]; 2]) {
    assert!(run.rows > 0 && run.columns > 0, "adafactor: a matrix without elements");
    vectorized(
        #[inline(always)]
        || {
            for part in run.parts(gradient.len()) {
                let row = &mut rows[part.row];
                let columns = columns[part.columns].chunks_mut(BLOCK);
                for (gradient, columns) in gradient[part.elements].chunks(BLOCK).zip(columns) {
                    *row += add_to_columns(gradient, clip, columns);
                }
            }
        },
    );
}

/// Adds squares to the sums of their columns, and returns their sum.
#[inline(always)]
fn add_to_columns(gradient: &[f32], clip: f32, columns: &mut [f64]) -> f64 {
    let mut clipped = [0.0; BLOCK];
    let elements = gradient.iter().zip(&mut clipped).zip(columns);
    for ((gradient, clipped), column) in elements {
        *clipped = clip * gradient;
        *column += f64::from(*clipped) * f64::from(*clipped);
    }
    sum_of_squares(&clipped[..gradient.len()])
}

/// Moves moments towards the means of squares: `moment = (1 - w) * moment + w * mean`, in f32, with
/// `mean = sum / count` rounded to f32 once and `w = step^beta2_decay`.
///
/// # Panics
///
/// If the lengths differ, or `step.step` is 0.
pub fn average_sums(step: &AdafactorStep, moments: &mut [f32], sums: &[f64], count: usize) {
    assert_eq!(sums.len(), moments.len(), "adafactor: lengths of sums and moments differ");
    let [keep, take] = step.weights();
    for (moment, sum) in moments.iter_mut().zip(sums) {
        *moment = keep * *moment + take * nearest_f32(sum / count as f64);
    }
}

/// Moves the second moment of each element towards the square of `g = clip * gradient`: `moment =
/// (1 - w) * moment + w * g * g`, in f32, with `w = step^beta2_decay`.
///
/// # Panics
///
/// If the lengths differ, or `step.step` is 0.
pub fn average_squares(step: &AdafactorStep, moments: &mut [f32], gradient: &[f32]) {
    assert_eq!(gradient.len(), moments.len(), "adafactor: lengths of gradient and moments differ");
    let [keep, take] = step.weights();
    vectorized(
        #[inline(always)]
        || {
            for (moment, gradient) in moments.iter_mut().zip(gradient) {
                let gradient = step.clip * gradient;
                *moment = keep * *moment + take * gradient * gradient;
            }
        },
    );
}

/// The sum of the squares of an update `u` before it is scaled, in f64. For each element of a run,
/// in this order and in f32:
///
/// ```text
/// v = row moment / max(mean of the matrix's row moments, epsilon1) * column moment  or, of one dim,  second moment
/// u = clip * gradient / sqrt(max(v, epsilon1^2))
/// ```
///
/// # Panics
///
/// If the run does not lie within the moments.
#[must_use]
pub fn squared_update(step: &AdafactorStep, gradient: &[f32], variance: Variance<'_>) -> f64 {
    vectorized(
        #[inline(always)]
        || {
            let mut sum = 0.0;
            variance.each_update(step.clip, gradient, |_, update| sum += sum_of_squares(update));
            sum
        },
    )
}

/// Updates a run of a parameter. With `u` of [`squared_update`], for each element, in this order
/// and in f32:
///
/// ```text
/// alpha = max(epsilon2, sqrt(squares / elements)) * min(learning_rate, 1 / sqrt(step))
/// scale = max(1, sqrt(squared_update / elements) / threshold)
/// p = p * (1 - learning_rate * weight_decay) - (alpha / scale) * u
/// ```
///
/// The factors of the last line are computed in f64. An element's bits do not depend on where a
/// parameter is cut into runs.
///
/// # Panics
///
/// If gradient and parameter differ in length, or the run does not lie within the moments.
pub fn adafactor(
    step: &AdafactorStep,
    sums: &ParameterSums,
    parameter: &mut [f32],
    gradient: &[f32],
    variance: Variance<'_>,
) {
    let len = parameter.len();
    assert_eq!(gradient.len(), len, "adafactor: lengths of gradient and parameter differ");
    let (keep, rate) = step.factors(sums);
    vectorized(
        #[inline(always)]
        || {
            variance.each_update(step.clip, gradient, |elements, update| {
                for (parameter, update) in parameter[elements].iter_mut().zip(update) {
                    *parameter = *parameter * keep - rate * update;
                }
            });
        },
    );
}

/// The elements of a run that lie in one row.
struct RowPart {
    /// The row, of those of all matrices.
    row: usize,
    /// The columns, of those of all matrices.
    columns: Range<usize>,
    /// The elements of the run.
    elements: Range<usize>,
}

impl MatrixRun {
    #[inline(always)]
    fn parts(self, len: usize) -> impl Iterator<Item = RowPart> {
        let Self { start, rows, columns } = self;
        let end = start + len;
        (start / columns..end.div_ceil(columns)).map(move |row| {
            let from = start.max(row * columns);
            let to = end.min((row + 1) * columns);
            let first = row / rows * columns + from % columns;
            let columns = first..first + (to - from);
            let elements = from - start..to - start;
            RowPart { row, columns, elements }
        })
    }
}

impl<'a> Factored<'a> {
    /// Makes the estimate for a parameter of matrices of `rows` and `columns`, from the moments of
    /// all rows and of all columns, `[matrices * rows]` and `[matrices * columns]`. The mean of a
    /// matrix's row moments is computed in f64 and rounded to f32 once.
    ///
    /// # Panics
    ///
    /// If the moments are not those of a number of matrices of these sizes, which are not 0.
    #[must_use]
    pub fn new(step: &AdafactorStep, moments: [&'a [f32]; 2], rows: usize, columns: usize) -> Self {
        assert!(rows > 0 && columns > 0, "adafactor: a matrix without elements");
        let [row_moments, column_moments] = moments;
        let matrices = row_moments.len() / rows;
        let fits = row_moments.len() == matrices * rows
            && column_moments.len().is_multiple_of(columns)
            && column_moments.len() / columns == matrices;
        assert!(fits, "adafactor: moments of other matrices");
        let mean =
            |rows: &[f32]| rows.iter().copied().map(f64::from).sum::<f64>() / rows.len() as f64;
        let least = |mean: f64| nearest_f32(mean.max(step.epsilon1));
        let means = row_moments.chunks_exact(rows).map(|rows| least(mean(rows))).collect();
        Self { row_moments, column_moments, means, rows, columns, least: step.least_variance() }
    }

    /// The variances of a run that begins at this element of the parameter.
    #[must_use]
    pub fn from(&'a self, start: usize) -> Variance<'a> {
        Variance::Factored(self, start)
    }
}

impl Variance<'_> {
    /// Calls `act` with the update of each element, in order, in blocks: with their range and their
    /// updates.
    #[inline(always)]
    fn each_update(self, clip: f32, gradient: &[f32], mut act: impl FnMut(Range<usize>, &[f32])) {
        match self {
            Self::Each(moments, least) => {
                assert_eq!(
                    moments.len(),
                    gradient.len(),
                    "adafactor: lengths of gradient and moments differ"
                );
                blocks(0..gradient.len(), |block| {
                    let updates = UpdateFactors { clip, least, factor: 1.0 };
                    let moments = &moments[block.clone()];
                    updates.of(&gradient[block.clone()], moments, |update| act(block, update));
                });
            }
            Self::Factored(of, start) => {
                let run = MatrixRun { start, rows: of.rows, columns: of.columns };
                for part in run.parts(gradient.len()) {
                    let factor = of.row_moments[part.row] / of.means[part.row / of.rows];
                    let updates = UpdateFactors { clip, least: of.least, factor };
                    let begin = part.elements.start;
                    let columns = &of.column_moments[part.columns];
                    blocks(part.elements, |block| {
                        let columns = &columns[block.start - begin..block.end - begin];
                        updates.of(&gradient[block.clone()], columns, |update| act(block, update));
                    });
                }
            }
        }
    }
}

/// The factors of the updates of consecutive elements.
#[derive(Clone, Copy)]
struct UpdateFactors {
    clip: f32,
    least: f32,
    /// The factor of a moment that makes it a variance.
    factor: f32,
}

impl UpdateFactors {
    /// Calls `act` with the updates of at most [`BLOCK`] elements.
    #[inline(always)]
    fn of(self, gradient: &[f32], moments: &[f32], act: impl FnOnce(&[f32])) {
        let mut updates = [0.0; BLOCK];
        for ((update, gradient), moment) in updates.iter_mut().zip(gradient).zip(moments) {
            let variance = self.factor * moment;
            // In this form, a variance that is NaN stays one.
            let variance = if variance < self.least { self.least } else { variance };
            *update = self.clip * gradient / variance.sqrt();
        }
        act(&updates[..gradient.len()]);
    }
}

/// Calls `act` for block after block of a range.
#[inline(always)]
fn blocks(range: Range<usize>, mut act: impl FnMut(Range<usize>)) {
    for start in range.clone().step_by(BLOCK) {
        act(start..range.end.min(start + BLOCK));
    }
}

#[cfg(test)]
mod tests;
