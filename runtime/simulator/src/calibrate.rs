//! Numbers of a machine that are fitted to measurements, and the errors of predictions. SIMULATOR.md, "Calibration".

mod all_reduces;
mod errors;
mod fitted;
mod least_squares;
mod measurements;
mod range;
mod sample;
mod standard_errors;
mod starts;
mod steps;
mod table;

#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;
use std::{panic, thread};

pub use self::all_reduces::{AllReduceRow, read_all_reduces};
pub use self::errors::Errors;
pub use self::fitted::Fitted;
pub(crate) use self::measurements::FITTED;
pub use self::measurements::Measurements;
pub use self::steps::{StepRow, read_steps};

use self::least_squares::{Place, Problem};
use self::range::Range;
use self::standard_errors::standard_errors;
use crate::machine::{Number, Unit};
use crate::{Error, Machine, Time};

/// A machine with numbers that were fitted.
#[derive(Clone, Debug)]
pub struct Fit {
    /// The machine, with the fitted numbers.
    pub machine: Machine,
    /// The fitted numbers, in the order in which they were asked for.
    pub numbers: Vec<Fitted>,
    /// The predictions of the measurements by this machine, in their order.
    pub predicted: Vec<Time>,
    /// Their errors.
    pub errors: Errors,
}

/// The sum of squares has several minima. So a fit goes down from the best of many points for some rounds, and to the end from the best of these.
const TRIED: usize = 10;
const ROUNDS_OF_TRIAL: usize = 8;
const ENDED: usize = 3;
const ROUNDS: usize = 60;

/// Rounds with all rows of a large table, after a sample has led near to the minimum.
const ROUNDS_OF_ALL: usize = 8;

/// Rows for which another thread is worth its start.
const ROWS_OF_THREAD: usize = 64;

/// Fits the numbers called `names` of `machine` to measurements, so that the squares of the
/// logarithms of `predicted / measured` are least. All other numbers stay. `predict` returns the
/// time of a row on a machine; rows of a large table are predicted on all cores.
///
/// The fit begins at the numbers of `machine` and at other points in fixed places, so it depends on
/// its arguments alone. With more than 1,000 rows it begins with a sample of them.
///
/// # Errors
/// [`Error::MachineNumber`] if the machine has no number of such a name. [`Error::Fit`] if fewer
/// than two measurements for each number differ (rows with the same prediction on `machine` count
/// once), if a time is 0, if no prediction depends on a number, if the relative standard error of a
/// number is above 1, if others can replace it, or if the best value is at an end of the possible
/// range. The errors of `predict` for the machine itself.
pub fn fit<R: Sync>(
    machine: &Machine,
    names: &[&str],
    measured: &Measurements<'_, R>,
    predict: impl Fn(&Machine, &R) -> Result<Time, Error> + Sync,
) -> Result<Fit, Error> {
    let numbers = names.iter().map(|name| number(machine, name)).collect::<Result<Vec<_>, _>>()?;
    let predicted = measured.rows.iter().map(|(row, _)| predict(machine, row));
    let predicted = predicted.collect::<Result<Vec<_>, _>>()?;
    let different = measured.different(names.len(), &predicted)?;
    let ranges = numbers.iter().map(|number| Range::new(&number.unit)).collect();
    let fitting = Fitting { machine, numbers, ranges, measured, predict };
    let ends: Vec<[f64; 2]> = fitting.ranges.iter().map(Range::ends).collect();
    let all: Vec<usize> = (0..measured.rows.len()).collect();
    let squares = Problem { ends, residuals: |point: &[f64]| fitting.residuals(point, &all) };
    let best = fitting.best(&squares, &predicted)?;
    let derivatives = squares.derivatives(&best);
    fitting.refuse_flat(&derivatives)?;
    let errors = standard_errors(&derivatives, &best, different - names.len());
    let fit = fitting.finish(&best.0, &errors)?;
    fitting.refuse_ends(&best.0)?;
    standard_errors::check(&fit.numbers)?;
    Ok(fit)
}

/// Numbers that are fitted; a point has their places in their ranges.
struct Fitting<'a, R, P> {
    machine: &'a Machine,
    numbers: Vec<Number>,
    ranges: Vec<Range>,
    measured: &'a Measurements<'a, R>,
    predict: P,
}

impl<R: Sync, P: Fn(&Machine, &R) -> Result<Time, Error> + Sync> Fitting<'_, R, P> {
    /// Returns the best minimum found. In a large table a sample leads near to it, and the fit goes
    /// on from there with all rows.
    fn best(
        &self,
        squares: &Problem<impl Fn(&[f64]) -> Result<Vec<f64>, Error>>,
        predicted: &[Time],
    ) -> Result<Place, Error> {
        let own = self.own();
        if predicted.len() <= sample::FEW {
            return self.best_of_many(squares, own);
        }
        let here = (squares.residuals)(&own)?;
        let derivatives = squares.derivatives(&(own.clone(), here));
        let rows = sample::of(predicted, &derivatives);
        let residuals = |point: &[f64]| self.residuals(point, &rows);
        let sampled = Problem { ends: squares.ends.clone(), residuals };
        let (point, _) = self.best_of_many(&sampled, own)?;
        let residuals = (squares.residuals)(&point)?;
        Ok(squares.descend((point, residuals), ROUNDS_OF_ALL))
    }

    /// Returns the places of the machine's own numbers.
    fn own(&self) -> Vec<f64> {
        let places = self.ranges.iter().zip(&self.numbers);
        places.map(|(range, number)| range.place(number.value)).collect()
    }

    /// Returns the best minimum found from many points.
    fn best_of_many(
        &self,
        squares: &Problem<impl Fn(&[f64]) -> Result<Vec<f64>, Error>>,
        own: Vec<f64>,
    ) -> Result<Place, Error> {
        let at = |point: Vec<f64>| (squares.residuals)(&point).map(|residuals| (point, residuals));
        let mut starts = vec![at(own.clone())?];
        let others = starts::around(&own, &self.ranges).into_iter();
        starts.extend(others.filter_map(|point| at(point).ok()));
        let tried = squares.lowest(starts, TRIED).into_iter();
        let tried = tried.map(|it| squares.descend(it, ROUNDS_OF_TRIAL)).collect();
        let ended = squares.lowest(tried, ENDED).into_iter();
        let ended = ended.map(|it| squares.descend(it, ROUNDS)).collect();
        squares.lowest(ended, 1).pop().ok_or_else(|| problem("there is no start".into()))
    }

    /// Returns the logarithms of predictions by measurements, for the rows at these indices.
    fn residuals(&self, point: &[f64], rows: &[usize]) -> Result<Vec<f64>, Error> {
        let machine = self.at(point)?;
        let logarithm = |row: &usize| {
            let (row, time) = &self.measured.rows[*row];
            Ok(logarithm((self.predict)(&machine, row)?, *time))
        };
        let of = |rows: &[usize]| rows.iter().map(logarithm).collect::<Result<Vec<_>, _>>();
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let each = rows.len().div_ceil(threads).max(ROWS_OF_THREAD);
        if rows.len() <= each {
            return of(rows);
        }
        let parts = thread::scope(|scope| {
            let of = &of;
            let threads: Vec<_> =
                rows.chunks(each).map(|rows| scope.spawn(move || of(rows))).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect::<Result<Vec<_>, Error>>()
        })?;
        Ok(parts.concat())
    }

    /// The machine with the numbers of a point.
    fn at(&self, point: &[f64]) -> Result<Machine, Error> {
        let mut machine = self.machine.clone();
        for ((number, range), place) in self.numbers.iter().zip(&self.ranges).zip(point) {
            machine.set(&number.name, range.value(*place), "fit")?;
        }
        Ok(machine)
    }

    /// Refuses numbers on which nothing depends.
    fn refuse_flat(&self, derivatives: &[Vec<f64>]) -> Result<(), Error> {
        let is_flat = |column: &Vec<f64>| column.iter().all(|it| *it == 0.0);
        match derivatives.iter().position(is_flat) {
            Some(index) => {
                Err(problem(format!("no measurement depends on {}", self.numbers[index].name)))
            }
            None => Ok(()),
        }
    }

    /// Refuses numbers that would be better if they were impossible.
    fn refuse_ends(&self, point: &[f64]) -> Result<(), Error> {
        let at_end = |index: &usize| self.ranges[*index].is_at_end(point[*index]);
        match (0..point.len()).find(at_end) {
            Some(index) => Err(self.impossible(index, point[index])),
            None => Ok(()),
        }
    }

    /// The error of a number whose best place is at an end.
    fn impossible(&self, index: usize, place: f64) -> Error {
        let Number { name, unit, .. } = &self.numbers[index];
        let Unit { least, most, name: unit, .. } = unit;
        let value = format!("{:.4} {unit}", self.ranges[index].value(place));
        let value = value.trim_end();
        problem(format!(
            "the best {name} is {value}, at an end of the possible {least} to {most}: the measurements contradict another number of the machine"
        ))
    }

    /// Rounds the numbers, says where they are from, and predicts with them.
    fn finish(&self, point: &[f64], standard_errors: &[f64]) -> Result<Fit, Error> {
        let mut machine = self.at(point)?;
        let source = self.measured.source();
        for ((number, range), place) in self.numbers.iter().zip(&self.ranges).zip(point) {
            machine.set(&number.name, four_digits(range.value(*place)), &source)?;
        }
        let rows = self.measured.rows;
        let predicted = rows.iter().map(|(row, _)| (self.predict)(&machine, row));
        let predicted = predicted.collect::<Result<Vec<_>, Error>>()?;
        let measured = rows.iter().map(|(_, time)| *time);
        let errors = Errors::of(predicted.iter().copied().zip(measured));
        let fitted = |(it, error): (&Number, &f64)| {
            Ok(Fitted { number: number(&machine, &it.name)?, standard_error: *error })
        };
        let numbers = self.numbers.iter().zip(standard_errors).map(fitted);
        let numbers = numbers.collect::<Result<_, Error>>()?;
        Ok(Fit { machine, numbers, predicted, errors })
    }
}

/// The number with four significant digits: measurements do not give more.
fn four_digits(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

fn number(machine: &Machine, name: &str) -> Result<Number, Error> {
    let found = machine.numbers().into_iter().find(|number| number.name == name);
    found.ok_or_else(|| Error::MachineNumber {
        name: name.to_owned(),
        problem: "is no number of this machine".into(),
    })
}

/// The logarithm of the predicted time by the measured one; a prediction of no time counts as a picosecond.
fn logarithm(predicted: Time, measured: Time) -> f64 {
    (predicted.picoseconds().max(1) as f64 / measured.picoseconds() as f64).ln()
}

fn problem(problem: String) -> Error {
    Error::Fit { problem }
}
