//! The linear equations of a step.

/// The normal equations of the free directions.
pub(in super::super) struct Normal {
    free: Vec<usize>,
    matrix: Vec<Vec<f64>>,
    right: Vec<f64>,
    directions: usize,
}

impl Normal {
    pub(in super::super) fn new(
        derivatives: &[Vec<f64>],
        residuals: &[f64],
        free: Vec<usize>,
    ) -> Self {
        let row =
            |a: &usize| free.iter().map(|b| dot(&derivatives[*a], &derivatives[*b])).collect();
        Self {
            matrix: free.iter().map(row).collect(),
            right: free.iter().map(|it| -dot(&derivatives[*it], residuals)).collect(),
            directions: derivatives.len(),
            free,
        }
    }

    /// The change in every direction, with a damping relative to the diagonal. None if the equations have no solution.
    pub(super) fn solve(&self, damping: f64) -> Option<Vec<f64>> {
        let solution = substituted(&self.factor(damping)?, &self.right);
        let mut change = vec![0.0; self.directions];
        for (direction, it) in self.free.iter().zip(solution) {
            change[*direction] = it;
        }
        Some(change).filter(|it| it.iter().all(|it| it.is_finite()))
    }

    /// The diagonal of the inverse of the matrix, with a damping relative to the diagonal; infinities if there is no inverse.
    pub(in super::super) fn inverse_diagonal(&self, damping: f64) -> Vec<f64> {
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

/// The solution of `factor * transposed factor * x = right`.
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

pub(in super::super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
