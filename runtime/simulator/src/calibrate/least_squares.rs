//! The method of Levenberg and Marquardt in a box, for at most a dozen numbers: crates for it have
//! no box, and bring a library of linear algebra.

use crate::Error;

/// Residuals as a function of a point, within a box: the first and the last place in each
/// direction.
pub(super) struct BoxedProblem<F> {
    pub(super) ends: Vec<[f64; 2]>,
    pub(super) residuals: F,
}

/// A point, with its residuals.
#[derive(Clone, Debug)]
pub(super) struct FitPoint {
    pub(super) at: Vec<f64>,
    pub(super) residuals: Vec<f64>,
}

impl FitPoint {
    fn squares(&self) -> f64 {
        squares(&self.residuals)
    }
}

/// The step of difference quotients: times are whole picoseconds, so a smaller one would measure
/// their rounding.
const STEP: f64 = 1e-4;
/// A round that improves the sum by a smaller part is the last.
const ENOUGH: f64 = 1e-5;
/// The longest step in a direction: the sums have bends, behind which derivatives say nothing.
const LONGEST: f64 = 0.5;
/// The damping at first, and that at which no step can help any more.
const DAMPING: f64 = 1e-3;
const MOST_DAMPING: f64 = 1e9;

impl<F: Fn(&[f64]) -> Result<Vec<f64>, Error>> BoxedProblem<F> {
    /// Computes the residuals of a point.
    pub(super) fn point(&self, at: Vec<f64>) -> Result<FitPoint, Error> {
        let residuals = (self.residuals)(&at)?;
        Ok(FitPoint { at, residuals })
    }

    /// Goes down from a place of the box, for at most so many rounds. No step is made to where
    /// residuals cannot be computed.
    pub(super) fn descend(&self, mut place: FitPoint, rounds: usize) -> FitPoint {
        let mut damping = DAMPING;
        for _ in 0..rounds {
            let system = self.system(&self.derivatives(&place), &place);
            let Some(next) = self.step(&system, &place, &mut damping) else { break };
            let before = place.squares();
            place = next;
            if before - place.squares() <= ENOUGH * before {
                break;
            }
        }
        place
    }

    /// Returns the places with the lowest sums, so many, the lowest first. Places come last where
    /// no residual depends on some direction: from there, no way leads in that direction.
    pub(super) fn lowest(&self, mut places: Vec<FitPoint>, count: usize) -> Vec<FitPoint> {
        places.sort_by(|a, b| a.squares().total_cmp(&b.squares()));
        let mut lowest = Vec::new();
        let mut flat = Vec::new();
        for place in places {
            if lowest.len() == count {
                break;
            }
            let derivatives = self.derivatives(&place);
            let is_flat = derivatives.iter().any(|column| column.iter().all(|it| *it == 0.0));
            if is_flat { flat.push(place) } else { lowest.push(place) }
        }
        lowest.extend(flat);
        lowest.truncate(count);
        lowest
    }

    /// Returns the derivatives of the residuals by each direction, as columns; zeros where they
    /// cannot be computed.
    pub(super) fn derivatives(&self, FitPoint { at, residuals }: &FitPoint) -> Vec<Vec<f64>> {
        let column = |direction: usize| {
            let step = if at[direction] + STEP > self.ends[direction][1] { -STEP } else { STEP };
            let mut beside = at.clone();
            beside[direction] += step;
            let quotient = |(next, here): (&f64, &f64)| (next - here) / step;
            match (self.residuals)(&beside) {
                Ok(beside) => beside.iter().zip(residuals).map(quotient).collect(),
                Err(_) => vec![0.0; residuals.len()],
            }
        };
        (0..at.len()).map(column).collect()
    }

    /// Returns the equations of a step. Directions in which the point is at an end, and the sum
    /// falls beyond it, stay as they are.
    fn system(&self, derivatives: &[Vec<f64>], point: &FitPoint) -> NormalEquations {
        let is_free = |direction: usize| {
            let down = -dot(&derivatives[direction], &point.residuals);
            let [least, most] = self.ends[direction];
            (point.at[direction] > least || down > 0.0)
                && (point.at[direction] < most || down < 0.0)
        };
        let free = (0..point.at.len()).filter(|it| is_free(*it)).collect();
        NormalEquations::new(derivatives, &point.residuals, free)
    }

    /// Returns the next place with a smaller sum, as the damping grows, or `None` if there is none.
    fn step(
        &self,
        system: &NormalEquations,
        place: &FitPoint,
        damping: &mut f64,
    ) -> Option<FitPoint> {
        let before = place.squares();
        while *damping < MOST_DAMPING {
            let next = system.solve(*damping).map(|change| self.moved(&place.at, &change));
            let tried = next.and_then(|next| self.point(next).ok());
            if let Some(better) = tried.filter(|it| it.squares() < before) {
                *damping = (*damping / 10.0).max(DAMPING * DAMPING);
                return Some(better);
            }
            *damping *= 10.0;
        }
        None
    }

    /// Returns a point after a change, which is shortened to [`LONGEST`] and ends at the box.
    fn moved(&self, point: &[f64], change: &[f64]) -> Vec<f64> {
        let longest = change.iter().fold(LONGEST, |longest, it| it.abs().max(longest));
        let moved = point.iter().zip(change).map(|(place, it)| place + it * LONGEST / longest);
        moved.zip(&self.ends).map(|(place, [least, most])| place.clamp(*least, *most)).collect()
    }
}

pub(super) fn squares(values: &[f64]) -> f64 {
    dot(values, values)
}

/// The normal equations of the free directions.
pub(super) struct NormalEquations {
    free: Vec<usize>,
    matrix: Vec<Vec<f64>>,
    right: Vec<f64>,
    directions: usize,
}

impl NormalEquations {
    pub(super) fn new(derivatives: &[Vec<f64>], residuals: &[f64], free: Vec<usize>) -> Self {
        let row =
            |a: &usize| free.iter().map(|b| dot(&derivatives[*a], &derivatives[*b])).collect();
        Self {
            matrix: free.iter().map(row).collect(),
            right: free.iter().map(|it| -dot(&derivatives[*it], residuals)).collect(),
            directions: derivatives.len(),
            free,
        }
    }

    /// Returns the change in every direction, with a damping relative to the diagonal, or `None` if
    /// the equations have no solution.
    fn solve(&self, damping: f64) -> Option<Vec<f64>> {
        let solution = substituted(&self.factor(damping)?, &self.right);
        let mut change = vec![0.0; self.directions];
        for (direction, it) in self.free.iter().zip(solution) {
            change[*direction] = it;
        }
        Some(change).filter(|it| it.iter().all(|it| it.is_finite()))
    }

    /// Returns the diagonal of the inverse of the matrix, with a damping relative to the diagonal;
    /// infinities if there is no inverse.
    pub(super) fn inverse_diagonal(&self, damping: f64) -> Vec<f64> {
        let size = self.right.len();
        let Some(factor) = self.factor(damping) else { return vec![f64::INFINITY; size] };
        let unit = |one: usize| -> Vec<f64> {
            (0..size).map(|it| f64::from(u8::from(it == one))).collect()
        };
        (0..size).map(|it| substituted(&factor, &unit(it))[it]).collect()
    }

    /// Cholesky's factor.
    fn factor(&self, damping: f64) -> Option<Vec<Vec<f64>>> {
        let size = self.right.len();
        let mut factor = vec![vec![0.0; size]; size];
        for row in 0..size {
            for column in 0..row {
                let known = dot(&factor[row][..column], &factor[column][..column]);
                factor[row][column] = (self.matrix[row][column] - known) / factor[column][column];
            }
            let diagonal = self.matrix[row][row];
            // A direction without slope stays where it is.
            let damped = if diagonal > 0.0 { diagonal * (1.0 + damping) } else { 1.0 };
            let rest = damped - dot(&factor[row][..row], &factor[row][..row]);
            factor[row][row] = Some(rest).filter(|rest| *rest > 0.0)?.sqrt();
        }
        Some(factor)
    }
}

/// Returns the solution of `factor * transposed factor * x = right`.
fn substituted(factor: &[Vec<f64>], right: &[f64]) -> Vec<f64> {
    let mut x = right.to_vec();
    for row in 0..x.len() {
        let known = dot(&factor[row][..row], &x[..row]);
        x[row] = (x[row] - known) / factor[row][row];
    }
    for row in (0..x.len()).rev() {
        let known: f64 = (row + 1..x.len()).map(|below| factor[below][row] * x[below]).sum();
        x[row] = (x[row] - known) / factor[row][row];
    }
    x
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
