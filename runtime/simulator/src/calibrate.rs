//! Numbers of a machine that are fitted to measurements, and the errors of predictions. SIMULATOR.md, "Calibration".

mod all_reduces;
mod errors;
mod least_squares;
mod range;
mod starts;
mod steps;
mod table;

#[cfg(test)]
mod tests;

pub use self::all_reduces::{AllReduceRow, read_all_reduces};
pub use self::errors::Errors;
pub use self::steps::{StepRow, read_steps};

use self::least_squares::{Place, Problem};
use self::range::Range;
use crate::machine::{Number, Unit};
use crate::{Error, Machine, Time};

/// A machine with numbers that were fitted.
#[derive(Clone, Debug)]
pub struct Fit {
    /// The machine, with the fitted numbers.
    pub machine: Machine,
    /// The fitted numbers, in the order in which they were asked for.
    pub numbers: Vec<Number>,
    /// The errors of the predictions by this machine.
    pub errors: Errors,
}

/// The sum of squares has several minima. So a fit goes down from the best of many points for some rounds, and to the end from the best of these.
const TRIED: usize = 10;
const ROUNDS_OF_TRIAL: usize = 8;
const ENDED: usize = 3;
const ROUNDS: usize = 60;

/// Fits the numbers called `names` of `machine` to measurements, so that the squares of the logarithms of `predicted / measured` are least. All other
/// numbers stay. Each measurement is a row and its time; `predict` has the time of a row on a machine.
///
/// The fit begins at the numbers of `machine` and at other points in fixed places, so it depends on its arguments alone.
///
/// # Errors
/// [`Error::MachineNumber`] if the machine has no number of such a name. [`Error::Fit`] if there are fewer measurements than numbers, if a time is 0, if
/// no prediction depends on a number, or if the best value is at the end of what is physically possible. Those of `predict` for the machine itself.
pub fn fit<R>(
    machine: &Machine,
    names: &[&str],
    measured: &[(R, Time)],
    predict: impl Fn(&Machine, &R) -> Result<Time, Error>,
) -> Result<Fit, Error> {
    check_measured(names, measured)?;
    let numbers = names.iter().map(|name| number(machine, name)).collect::<Result<Vec<_>, _>>()?;
    let ranges = numbers.iter().map(|number| Range::new(&number.unit)).collect();
    let fitting = Fitting { machine, numbers, ranges, measured, predict };
    let ends = fitting.ranges.iter().map(Range::ends).collect();
    let squares = Problem { ends, residuals: |point: &[f64]| fitting.residuals(point) };
    let best = fitting.best(&squares)?;
    fitting.check(&best.0, &squares.derivatives(&best))?;
    fitting.finish(&best.0)
}

/// Numbers that are fitted; a point has their places in their ranges.
struct Fitting<'a, R, P> {
    machine: &'a Machine,
    numbers: Vec<Number>,
    ranges: Vec<Range>,
    measured: &'a [(R, Time)],
    predict: P,
}

impl<R, P: Fn(&Machine, &R) -> Result<Time, Error>> Fitting<'_, R, P> {
    /// The best minimum that is found.
    fn best(
        &self,
        squares: &Problem<impl Fn(&[f64]) -> Result<Vec<f64>, Error>>,
    ) -> Result<Place, Error> {
        let places = self.ranges.iter().zip(&self.numbers);
        let own: Vec<f64> = places.map(|(range, number)| range.place(number.value)).collect();
        let at = |point: Vec<f64>| self.residuals(&point).map(|residuals| (point, residuals));
        let mut starts = vec![at(own.clone())?];
        let others = starts::around(&own, &self.ranges).into_iter();
        starts.extend(others.filter_map(|point| at(point).ok()));
        let tried = squares.lowest(starts, TRIED).into_iter();
        let tried = tried.map(|it| squares.descend(it, ROUNDS_OF_TRIAL)).collect();
        let ended = squares.lowest(tried, ENDED).into_iter();
        let ended = ended.map(|it| squares.descend(it, ROUNDS)).collect();
        squares.lowest(ended, 1).pop().ok_or_else(|| problem("there is no start".into()))
    }

    /// The logarithms of predictions by measurements.
    fn residuals(&self, point: &[f64]) -> Result<Vec<f64>, Error> {
        let machine = self.at(point)?;
        let logarithm =
            |(row, time): &(R, Time)| Ok(logarithm((self.predict)(&machine, row)?, *time));
        self.measured.iter().map(logarithm).collect()
    }

    /// The machine with the numbers of a point.
    fn at(&self, point: &[f64]) -> Result<Machine, Error> {
        let mut machine = self.machine.clone();
        for ((number, range), place) in self.numbers.iter().zip(&self.ranges).zip(point) {
            machine.set(&number.name, range.value(*place), "fit")?;
        }
        Ok(machine)
    }

    /// Refuses numbers on which nothing depends, and those that would be better if they were impossible.
    fn check(&self, point: &[f64], derivatives: &[Vec<f64>]) -> Result<(), Error> {
        for (index, Number { name, unit, .. }) in self.numbers.iter().enumerate() {
            if derivatives[index].iter().all(|it| *it == 0.0) {
                return Err(problem(format!("no measurement depends on {name}")));
            }
            let (range, Unit { least, most, name: unit, .. }) = (&self.ranges[index], unit);
            if range.is_at_end(point[index]) {
                let value = range.value(point[index]);
                let value = format!("{value:.4} {unit}");
                let value = value.trim_end();
                return Err(problem(format!(
                    "the best {name} is {value}, at an end of the possible {least} to {most}: the measurements contradict another number of the machine"
                )));
            }
        }
        Ok(())
    }

    /// Rounds the numbers, says where they are from, and predicts with them.
    fn finish(&self, point: &[f64]) -> Result<Fit, Error> {
        let mut machine = self.at(point)?;
        let source = format!("fitted to {} measurements", self.measured.len());
        for ((number, range), place) in self.numbers.iter().zip(&self.ranges).zip(point) {
            machine.set(&number.name, four_digits(range.value(*place)), &source)?;
        }
        let pair = |(row, time): &(R, Time)| Ok(((self.predict)(&machine, row)?, *time));
        let pairs = self.measured.iter().map(pair).collect::<Result<Vec<_>, Error>>()?;
        let numbers = self.numbers.iter().map(|it| number(&machine, &it.name));
        Ok(Fit { numbers: numbers.collect::<Result<_, _>>()?, errors: Errors::of(pairs), machine })
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

fn check_measured<R>(names: &[&str], measured: &[(R, Time)]) -> Result<(), Error> {
    if names.is_empty() || measured.len() < names.len() {
        let (rows, numbers) = (measured.len(), names.len());
        return Err(problem(format!("{rows} measurements cannot fit {numbers} numbers")));
    }
    match measured.iter().position(|(_, time)| *time == Time::ZERO) {
        Some(row) => Err(problem(format!("measurement {row} is a time of 0"))),
        None => Ok(()),
    }
}

fn problem(problem: String) -> Error {
    Error::Fit { problem }
}
