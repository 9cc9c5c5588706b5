//! Numbers of a machine that are fitted to measurements, and the errors of predictions.
//! SIMULATOR.md, "Calibration".

mod least_squares;
mod tables;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;

use rayon::prelude::*;

pub use self::tables::{AllReduceRow, StepRow, read_all_reduces, read_steps};

use self::least_squares::{BoxedProblem, FitPoint, NormalEquations, dot, squares};
use crate::machine::{MeasureUnit, NamedNumber};
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

/// The sum of squares has several minima. So a fit goes down from the best of many points for some
/// rounds, and to the end from the best of these.
const TRIED: usize = 10;
const ROUNDS_OF_TRIAL: usize = 8;
const ENDED: usize = 3;
const ROUNDS: usize = 60;

/// Rounds with all rows of a large table, after a sample has led near to the minimum.
const ROUNDS_OF_ALL: usize = 8;

/// Rows for which another thread is worth its wake-up.
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
    let fitting = NumbersFit { machine, numbers, ranges, measured, predict };
    let ends: Vec<[f64; 2]> = fitting.ranges.iter().map(Range::ends).collect();
    let all: Vec<usize> = (0..measured.rows.len()).collect();
    let squares = BoxedProblem { ends, residuals: |point: &[f64]| fitting.residuals(point, &all) };
    let best = fitting.best(&squares, &predicted)?;
    let derivatives = squares.derivatives(&best);
    fitting.refuse_flat(&derivatives)?;
    let errors = standard_errors(&derivatives, &best.residuals, different - names.len());
    let fit = fitting.finish(&best.at, &errors)?;
    fitting.refuse_ends(&best.at)?;
    refuse_undetermined(&fit.numbers)?;
    Ok(fit)
}

/// Numbers that are fitted; a point has their places in their ranges.
struct NumbersFit<'a, R, P> {
    machine: &'a Machine,
    numbers: Vec<NamedNumber>,
    ranges: Vec<Range>,
    measured: &'a Measurements<'a, R>,
    predict: P,
}

impl<R: Sync, P: Fn(&Machine, &R) -> Result<Time, Error> + Sync> NumbersFit<'_, R, P> {
    /// Returns the best minimum found. In a large table a sample leads near to it, and the fit goes
    /// on from there with all rows.
    fn best(
        &self,
        squares: &BoxedProblem<impl Fn(&[f64]) -> Result<Vec<f64>, Error>>,
        predicted: &[Time],
    ) -> Result<FitPoint, Error> {
        let own = self.own();
        if predicted.len() <= FEW_ROWS {
            return self.best_of_many(squares, own);
        }
        let derivatives = squares.derivatives(&squares.point(own.clone())?);
        let rows = sample_of(predicted, &derivatives);
        let residuals = |point: &[f64]| self.residuals(point, &rows);
        let sampled = BoxedProblem { ends: squares.ends.clone(), residuals };
        let best = self.best_of_many(&sampled, own)?;
        Ok(squares.descend(squares.point(best.at)?, ROUNDS_OF_ALL))
    }

    /// Returns the places of the machine's own numbers.
    fn own(&self) -> Vec<f64> {
        let places = self.ranges.iter().zip(&self.numbers);
        places.map(|(range, number)| range.place(number.value)).collect()
    }

    /// Returns the best minimum found from many points.
    fn best_of_many(
        &self,
        squares: &BoxedProblem<impl Fn(&[f64]) -> Result<Vec<f64>, Error>>,
        own: Vec<f64>,
    ) -> Result<FitPoint, Error> {
        let mut starts = vec![squares.point(own.clone())?];
        let others = starts_around(&own, &self.ranges).into_iter();
        starts.extend(others.filter_map(|at| squares.point(at).ok()));
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
        if rows.len() <= ROWS_OF_THREAD {
            return rows.iter().map(logarithm).collect();
        }
        let rows = rows.par_iter().with_min_len(ROWS_OF_THREAD / 2);
        let all: Vec<Result<f64, Error>> = rows.map(logarithm).collect();
        all.into_iter().collect()
    }

    /// Returns the machine with the numbers of a point.
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

    /// Returns the error of a number whose best place is at an end.
    fn impossible(&self, index: usize, place: f64) -> Error {
        let NamedNumber { name, unit, .. } = &self.numbers[index];
        let MeasureUnit { least, most, name: unit, .. } = unit;
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
        let fitted = |(it, error): (&NamedNumber, &f64)| {
            Ok(Fitted { number: number(&machine, &it.name)?, standard_error: *error })
        };
        let numbers = self.numbers.iter().zip(standard_errors).map(fitted);
        let numbers = numbers.collect::<Result<_, Error>>()?;
        Ok(Fit { machine, numbers, predicted, errors })
    }
}

/// Returns the number with four significant digits: measurements do not give more.
fn four_digits(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

fn number(machine: &Machine, name: &str) -> Result<NamedNumber, Error> {
    let found = machine.numbers().into_iter().find(|number| number.name == name);
    found.ok_or_else(|| Error::MachineNumber {
        name: name.to_owned(),
        problem: "is no number of this machine".into(),
    })
}

/// Returns the logarithm of the predicted time by the measured one; a prediction of no time counts
/// as a picosecond.
fn logarithm(predicted: Time, measured: Time) -> f64 {
    (predicted.picoseconds().max(1) as f64 / measured.picoseconds() as f64).ln()
}

fn problem(problem: String) -> Error {
    Error::Fit { problem }
}

/// A number that was fitted.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// The number.
    pub number: NamedNumber,
    /// Its standard error, relative to its value: 0.02 is 2 %.
    pub standard_error: f64,
}

/// Standard errors beyond it are shown as more than it: the derivatives from which they follow hold
/// near a number only.
const SHOWN_ERROR: f64 = 10.0;

/// `0.61 +- 2.0 %`.
impl fmt::Display for Fitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, standard_error } = self;
        match *standard_error <= SHOWN_ERROR {
            true => write!(f, "{number} +- {:.1} %", 100.0 * standard_error),
            false => write!(f, "{number} +- more than {:.0} %", 100.0 * SHOWN_ERROR),
        }
    }
}

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

/// Number of different rows that are needed for each number. With one for each, all residuals are
/// 0, and say nothing about the errors of numbers.
const ROWS_BY_NUMBER: usize = 2;

impl<R> Measurements<'_, R> {
    /// Returns the number of rows that differ. Rows with one `predicted` time count once, since
    /// they add nothing to a fit.
    ///
    /// # Errors
    /// [`Error::Fit`] if it is too small for so many numbers, or if a time is 0.
    fn different(&self, numbers: usize, predicted: &[Time]) -> Result<usize, Error> {
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

    /// Returns the source of a number that is fitted to them.
    fn source(&self) -> String {
        format!("{FITTED}{} rows of {}", self.rows.len(), self.table)
    }
}

/// The possible values of a number, and those at which fits begin.
#[derive(Clone, Debug, PartialEq)]
struct Range {
    values: RangeInclusive<f64>,
    is_part: bool,
}

/// No duration that counts is shorter, in seconds.
const LEAST_SECONDS: f64 = 1e-12;
/// A number with a unit may be wrong by this factor.
const FACTOR: f64 = 12.0;
/// The part of a peak that is reached is seldom smaller.
const LEAST_PART: f64 = 0.15;
/// A number that is as near to the end of its range, by its logarithm, would leave it.
const NEAR_END: f64 = 1e-3;

impl Range {
    fn new(unit: &MeasureUnit) -> Self {
        let is_part = unit.name.is_empty() && !unit.is_whole;
        Self { values: unit.least.max(LEAST_SECONDS)..=unit.most, is_part }
    }

    fn place(&self, value: f64) -> f64 {
        value.clamp(*self.values.start(), *self.values.end()).ln()
    }

    /// Returns the value at a place.
    fn value(&self, place: f64) -> f64 {
        place.exp().clamp(*self.values.start(), *self.values.end())
    }

    /// Returns the first and the last place.
    fn ends(&self) -> [f64; 2] {
        [self.values.start().ln(), self.values.end().ln()]
    }

    /// Returns a place for a start, `way` of the distance from the lowest to the highest that are
    /// worth a try.
    fn start(&self, own: f64, way: f64) -> f64 {
        let distance = FACTOR.ln();
        let [low, high] = match self.is_part {
            true => [LEAST_PART.ln(), self.ends()[1]],
            false => [own - distance, own + distance],
        };
        let [least, most] = self.ends();
        (high - low).mul_add(way, low).clamp(least, most)
    }

    /// Returns whether a place is at an end of the range.
    fn is_at_end(&self, place: f64) -> bool {
        let [least, most] = self.ends();
        place < least + NEAR_END || place > most - NEAR_END
    }
}

const POINTS: usize = 100;

/// Points of a sequence that fills a cube evenly (Halton's), around `own`.
fn starts_around(own: &[f64], ranges: &[Range]) -> Vec<Vec<f64>> {
    let primes = (2..).filter(|n: &usize| (2..*n).all(|divisor| !n.is_multiple_of(divisor)));
    let primes: Vec<usize> = primes.take(own.len()).collect();
    let point = |index: usize| {
        let ways = primes.iter().map(|prime| mirrored(index, *prime));
        let places = ranges.iter().zip(own).zip(ways);
        places.map(|((range, own), way)| range.start(*own, way)).collect()
    };
    (1..=POINTS).map(point).collect()
}

/// Returns the digits of `index` in `base`, behind the point and in reverse order: 6 = 110 in base
/// 2 gives 0.011.
fn mirrored(mut index: usize, base: usize) -> f64 {
    let mut sum = 0.0;
    let mut unit = 1.0;
    while index > 0 {
        unit /= base as f64;
        sum += unit * (index % base) as f64;
        index /= base;
    }
    sum
}

/// Maximum number of rows of a table that is fitted as a whole from the start: a fit predicts each
/// row some hundred times.
const FEW_ROWS: usize = 1000;

/// Rows of a sample that are spread over all predictions, and rows that depend most on each number.
const SPREAD: usize = 600;
const BY_NUMBER: usize = 50;

/// Returns the indices of a sample of rows, in order. They are evenly spread by their `predicted`
/// time, whatever their order in the table. For each number the sample also has the rows with the
/// largest derivative by it, which may be rare.
fn sample_of(predicted: &[Time], derivatives: &[Vec<f64>]) -> Vec<usize> {
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

/// The largest relative standard error: a number with a larger one cannot be told from 0, since the
/// variance of the residuals would be smaller without it.
const MOST_STANDARD_ERROR: f64 = 1.0;
/// The least part of a column of derivatives that others do not explain. They are difference
/// quotients, with errors of about a tenth of it.
const INDEPENDENT: f64 = 1e-3;
/// With it, columns that are sums of others have an inverse too, with a diagonal that is far beyond
/// what is allowed.
const DAMPING: f64 = 1e-12;

/// Returns the standard errors of numbers at the best place, relative to the numbers, since places
/// are logarithms. They are infinite for numbers that others can replace. There are `freedom` more
/// measurements than numbers, of which rows that are alike count as one: repeated ones are no other
/// evidence.
fn standard_errors(derivatives: &[Vec<f64>], residuals: &[f64], freedom: usize) -> Vec<f64> {
    let all = (0..derivatives.len()).collect();
    let inverse = NormalEquations::new(derivatives, residuals, all).inverse_diagonal(DAMPING);
    let variance = squares(residuals) / freedom as f64;
    let error = |(inverse, column): (f64, &Vec<f64>)| {
        let independent = 1.0 / (inverse * dot(column, column)).sqrt();
        if independent > INDEPENDENT { (variance * inverse).sqrt() } else { f64::INFINITY }
    };
    inverse.into_iter().zip(derivatives).map(error).collect()
}

/// Refuses numbers that the measurements do not determine.
fn refuse_undetermined(numbers: &[Fitted]) -> Result<(), Error> {
    let undetermined = numbers.iter().filter(|it| it.standard_error > MOST_STANDARD_ERROR);
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

/// The errors of predictions beside measurements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Errors {
    /// Error of each measurement: `predicted / measured - 1`.
    pub relative: Vec<f64>,
}

impl Errors {
    /// Returns the errors of pairs of a predicted and a measured time. A measured time of 0 has an
    /// infinite error.
    #[must_use]
    pub fn of(pairs: impl IntoIterator<Item = (Time, Time)>) -> Self {
        let relative = |(predicted, measured): (Time, Time)| match measured {
            Time::ZERO => f64::INFINITY,
            measured => predicted.seconds() / measured.seconds() - 1.0,
        };
        Self { relative: pairs.into_iter().map(relative).collect() }
    }

    /// Returns the mean of their absolute values; 0 if there are none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        let sum: f64 = self.relative.iter().map(|error| error.abs()).sum();
        sum / self.relative.len().max(1) as f64
    }

    /// Returns the largest of their absolute values; 0 if there are none.
    #[must_use]
    pub fn worst(&self) -> f64 {
        self.relative.iter().fold(0.0, |worst, error| error.abs().max(worst))
    }
}

/// A stated error of predictions. Two steps whose predictions differ by less than it cannot be told
/// apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StatedError {
    /// The largest relative error of predictions beside the measurements that are the most alike:
    /// 0.062 is 6.2 %.
    pub relative: f64,
    /// The steps for which it is stated, in words.
    pub of: &'static str,
}

impl StatedError {
    /// Cards that were fitted to measured steps, on one machine.
    pub const NODE: Self =
        Self { relative: 0.062, of: "cards that were fitted to steps, on one machine" };
    /// Cores that were fitted to measured steps.
    pub const CORES: Self = Self { relative: 0.155, of: "cores that were fitted to steps" };
    /// All others.
    pub const OTHERS: Self =
        Self { relative: 0.202, of: "several machines, or numbers that were fitted to no steps" };

    /// Returns how many times a speed is behind the fastest by this error: 0 if both tie.
    #[must_use]
    pub fn band(&self, speed: f64, fastest: f64) -> u32 {
        let mut band = 0;
        let mut least = self.floor(fastest);
        while speed < least && band < MOST_BANDS {
            band += 1;
            least = self.floor(least);
        }
        band
    }

    /// Returns the least speed that ties with one.
    #[must_use]
    pub fn floor(&self, speed: f64) -> f64 {
        speed / (1.0 + self.relative)
    }
}

/// Speeds further behind are in one band.
const MOST_BANDS: u32 = 1000;

impl Machine {
    /// Returns whether the source of each number that `hsdp calibrate` fits to steps begins with
    /// `fitted to`, as sources of fits do.
    #[must_use]
    pub fn is_fitted(&self) -> bool {
        let numbers = self.numbers();
        let is_fitted = |name: &&str| {
            numbers.iter().any(|it| it.name == *name && it.source.starts_with(FITTED))
        };
        StepRow::numbers(self).iter().all(is_fitted)
    }

    /// Returns the error that docs/simulator.md states for steps of a number of ranks.
    #[must_use]
    pub fn stated_error(&self, ranks: usize) -> StatedError {
        match (self.is_fitted(), self.device()) {
            (true, None) => StatedError::CORES,
            (true, Some(_)) if ranks <= self.cards() => StatedError::NODE,
            _ => StatedError::OTHERS,
        }
    }
}
