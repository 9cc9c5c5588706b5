//! The method of Levenberg and Marquardt in a box, for at most a dozen numbers: crates for it have no box, and bring a library of linear algebra.

mod normal;

pub(super) use self::normal::{Normal, dot};
use crate::Error;

/// Residuals as a function of a point, within a box: the first and the last place in each direction.
pub(super) struct Problem<F> {
    pub(super) ends: Vec<[f64; 2]>,
    pub(super) residuals: F,
}

/// A point, with its residuals.
pub(super) type Place = (Vec<f64>, Vec<f64>);

/// The step of difference quotients: times are whole picoseconds, so a smaller one would measure their rounding.
const STEP: f64 = 1e-4;
/// A round that improves the sum by a smaller part is the last.
const ENOUGH: f64 = 1e-5;
/// The longest step in a direction: the sums have bends, behind which derivatives say nothing.
const LONGEST: f64 = 0.5;
/// The damping at first, and that at which no step can help any more.
const DAMPING: f64 = 1e-3;
const MOST_DAMPING: f64 = 1e9;

impl<F: Fn(&[f64]) -> Result<Vec<f64>, Error>> Problem<F> {
    /// Goes down from a place of the box, for at most so many rounds. No step is made to where residuals cannot be computed.
    pub(super) fn descend(&self, mut place: Place, rounds: usize) -> Place {
        let mut damping = DAMPING;
        for _ in 0..rounds {
            let system = self.system(&self.derivatives(&place), &place);
            let Some(next) = self.step(&system, &place, &mut damping) else { break };
            let (before, after) = (squares(&place.1), squares(&next.1));
            place = next;
            if before - after <= ENOUGH * before {
                break;
            }
        }
        place
    }

    /// The places with the lowest sums, so many, the lowest first. Places come last where no residual depends on some direction: from there, no way
    /// leads in that direction.
    pub(super) fn lowest(&self, mut places: Vec<Place>, count: usize) -> Vec<Place> {
        places.sort_by(|a, b| squares(&a.1).total_cmp(&squares(&b.1)));
        let (mut lowest, mut flat) = (Vec::new(), Vec::new());
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

    /// The derivatives of the residuals by each direction, as columns; zeros where they cannot be computed.
    pub(super) fn derivatives(&self, (point, residuals): &Place) -> Vec<Vec<f64>> {
        let column = |direction: usize| {
            let step = if point[direction] + STEP > self.ends[direction][1] { -STEP } else { STEP };
            let mut beside = point.clone();
            beside[direction] += step;
            let quotient = |(next, here): (&f64, &f64)| (next - here) / step;
            match (self.residuals)(&beside) {
                Ok(beside) => beside.iter().zip(residuals).map(quotient).collect(),
                Err(_) => vec![0.0; residuals.len()],
            }
        };
        (0..point.len()).map(column).collect()
    }

    /// The equations of a step. Directions in which the point is at an end, and the sum falls beyond it, stay as they are.
    fn system(&self, derivatives: &[Vec<f64>], (point, residuals): &Place) -> Normal {
        let is_free = |direction: usize| {
            let down = -dot(&derivatives[direction], residuals);
            let [least, most] = self.ends[direction];
            (point[direction] > least || down > 0.0) && (point[direction] < most || down < 0.0)
        };
        Normal::new(derivatives, residuals, (0..point.len()).filter(|it| is_free(*it)).collect())
    }

    /// The next place with a smaller sum, as the damping grows; none if there is none.
    fn step(&self, system: &Normal, place: &Place, damping: &mut f64) -> Option<Place> {
        let before = squares(&place.1);
        while *damping < MOST_DAMPING {
            let next = system.solve(*damping).map(|change| self.moved(&place.0, &change));
            let tried = next.and_then(|next| (self.residuals)(&next).ok().map(|it| (next, it)));
            if let Some(better) = tried.filter(|(_, it)| squares(it) < before) {
                *damping = (*damping / 10.0).max(DAMPING * DAMPING);
                return Some(better);
            }
            *damping *= 10.0;
        }
        None
    }

    /// A point after a change, which is shortened to [`LONGEST`] and ends at the box.
    fn moved(&self, point: &[f64], change: &[f64]) -> Vec<f64> {
        let longest = change.iter().fold(LONGEST, |longest, it| it.abs().max(longest));
        let moved = point.iter().zip(change).map(|(place, it)| place + it * LONGEST / longest);
        moved.zip(&self.ends).map(|(place, [least, most])| place.clamp(*least, *most)).collect()
    }
}

pub(super) fn squares(values: &[f64]) -> f64 {
    dot(values, values)
}
