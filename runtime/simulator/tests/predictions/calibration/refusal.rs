//! Measurements to which no possible numbers can be fitted.

use hsdp_simulator::{Machine, Measurements, StepRow, Time, fit};

use super::closed_form::{Measured, STEPS, steps};

fn node() -> Machine {
    Machine::bundled("a100-node").expect("bundled")
}

fn error(names: &[&str], rows: &[(Measured, Time)]) -> String {
    let measurements = Measurements { table: "steps", rows };
    let outcome = fit(&node(), names, &measurements, Measured::predict);
    outcome.expect_err("refused").to_string()
}

#[test]
fn steps_that_are_faster_than_the_peak() {
    let thirds = steps(STEPS).into_iter().map(|(row, time)| (row, thirds_of(time)));
    let error = error(&["compute.efficiency"], &thirds.collect::<Vec<_>>());
    let expected = "fit: the best compute.efficiency is 1.0000, at an end of the possible";
    assert!(error.starts_with(expected), "{error}");
}

fn thirds_of(time: Time) -> Time {
    Time::from_seconds(time.seconds() / 3.0).expect("a time")
}

#[test]
fn numbers_that_do_not_matter() {
    let error = error(&["host.capacity", "compute.launch"], &steps(STEPS));
    assert_eq!(error, "fit: no measurement depends on host.capacity");
}

#[test]
fn too_few_measurements() {
    let error = error(StepRow::numbers(&node()), &steps(STEPS)[..5]);
    assert_eq!(
        error,
        "fit: 5 measurements, of which 5 differ, cannot fit 6 numbers: these need 12 that differ"
    );
}

#[test]
fn numbers_that_no_machine_has() {
    let error = error(&["compute.speed"], &steps(STEPS));
    assert_eq!(error, "compute.speed: is no number of this machine");
}
