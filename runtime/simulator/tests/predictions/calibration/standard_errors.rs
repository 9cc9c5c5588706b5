//! The standard errors of fitted numbers, beside formulas of textbooks.

use hsdp_simulator::{Error, Fit, Machine, Measurements, Time, fit};

use super::closed_form::{STEPS, a100_with_links, fitted, steps};

/// The part of a measured time beyond the true one.
const NOISE: f64 = 0.01;

fn seconds(seconds: f64) -> Time {
    Time::from_seconds(seconds).expect("a time")
}

/// Times of so many launches, which are too long or too short in turn.
fn launches(count: u32) -> Vec<(u32, Time)> {
    let sign = |row: u32| if row.is_multiple_of(2) { NOISE } else { -NOISE };
    (1..=count).map(|row| (row, seconds(1e-5 * f64::from(row) * sign(row).exp()))).collect()
}

fn fit_launch(rows: &[(u32, Time)]) -> Result<Fit, Error> {
    let machine = Machine::bundled("a100-node").expect("bundled");
    let predict = |machine: &Machine, row: &u32| {
        Ok(seconds(machine.compute.launch.value() * f64::from(*row)))
    };
    fit(&machine, &["compute.launch"], &Measurements { table: "launches", rows }, predict)
}

fn error_of_launch(rows: &[(u32, Time)]) -> f64 {
    fit_launch(rows).expect("a fit").numbers[0].standard_error
}

/// The standard error of a mean: of n logarithms that are off by the noise, it is the noise by the root of n - 1.
#[test]
fn one_number_has_the_error_of_a_mean() {
    for count in [2, 10, 50] {
        let error = error_of_launch(&launches(count));
        let mean = NOISE / f64::from(count - 1).sqrt();
        assert!((error / mean - 1.0).abs() < 1e-3, "{count}: {error} {mean}");
    }
}

#[test]
fn repeated_rows_are_no_other_evidence() {
    let once = launches(10);
    let often = once.repeat(7);
    let [once, often] = [once, often].map(|rows| error_of_launch(&rows));
    assert!((often / once - 1.0).abs() < 1e-6, "{once} {often}");
    let error = fit_launch(&launches(1).repeat(7)).expect_err("refused").to_string();
    assert_eq!(
        error,
        "fit: 7 measurements, of which 1 differ, cannot fit 1 numbers: these need 2 that differ"
    );
}

#[test]
fn a_fit_names_its_table() {
    let fit = fit_launch(&launches(10)).expect("a fit");
    let launch = fit.machine.numbers().into_iter().find(|it| it.name == "compute.launch");
    assert_eq!(launch.expect("a number").source, "fitted to 10 rows of launches");
    assert_eq!(fit.numbers[0].number.source, "fitted to 10 rows of launches");
    assert_eq!(fit.numbers[0].to_string(), "10 us +- 0.3 %");
}

/// Of a product, measurements without any noise tell no factor.
#[test]
fn numbers_that_others_replace_are_refused() {
    let machine = Machine::bundled("a100-node").expect("bundled");
    let predict = |machine: &Machine, row: &u32| {
        let product = machine.memory.efficiency.value() * machine.compute.efficiency.value();
        Ok(seconds(f64::from(*row) / product))
    };
    let rows: Vec<_> = (1..=20).map(|row| (row, seconds(f64::from(row) / 0.25))).collect();
    let names = ["memory.efficiency", "compute.efficiency"];
    let outcome = fit(&machine, &names, &Measurements { table: "products", rows: &rows }, predict);
    let error = outcome.expect_err("refused").to_string();
    let start = "fit: the measurements do not determine memory.efficiency (";
    assert!(error.starts_with(start), "{error}");
    assert!(error.contains(") and compute.efficiency ("), "{error}");
    assert_eq!(error.matches("+- more than 1000 %").count(), 2, "{error}");
}

/// Fits to rows that lack a kind of step predict this kind badly, and their errors tell so before.
#[test]
fn steps_of_too_few_kinds_are_refused() {
    let machine = a100_with_links().machine;
    for sequences in [1, 2] {
        let mut rows = steps(STEPS);
        rows.retain(|(row, _)| row.row.batch.sequences != sequences);
        let error = fitted(&machine, &rows).expect_err("refused").to_string();
        println!("without micro_batch {sequences}: {error}");
        let start = "fit: the measurements do not determine compute.half (";
        assert!(error.starts_with(start), "without micro_batch {sequences}: {error}");
    }
}
