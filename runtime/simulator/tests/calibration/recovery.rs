//! Numbers that are found again from the steps that they predict.

use hsdp_simulator::{Machine, Time, fit};

use crate::closed_form::{COMPUTATION, Measured, STEPS, steps};

const KNOWN: [f64; 6] = [0.8, 0.7, 0.25, 4e9, 20e-6, 6e-6];

/// The steps of the table, as they would be on a machine with the known numbers, each longer or shorter by up to `noise`.
fn generated(noise: f64) -> (Machine, Vec<(Measured, Time)>) {
    let machine = Machine::bundled("a100-node").expect("bundled");
    let mut known = machine.clone();
    for (name, value) in COMPUTATION.iter().zip(KNOWN) {
        known.set(name, value, "known").expect("possible");
    }
    let generate = |(number, (row, _)): (usize, (Measured, Time))| {
        let time = Measured::predict(&known, &row).expect("a prediction").seconds();
        let wave = (number as f64 * 2.4).sin();
        (row, Time::from_seconds(time * noise.mul_add(wave, 1.0)).expect("a time"))
    };
    (machine, steps(STEPS).into_iter().enumerate().map(generate).collect())
}

/// The largest error of a number that is fitted to such steps.
fn worst_number(noise: f64) -> f64 {
    let (machine, steps) = generated(noise);
    let fit = fit(&machine, &COMPUTATION, &steps, Measured::predict).expect("a fit");
    assert!(fit.errors.mean() <= noise + 1e-4, "{}", fit.errors.mean());
    let error = |(number, known): (&hsdp_simulator::machine::Number, f64)| {
        (number.value / known - 1.0).abs()
    };
    fit.numbers.iter().zip(KNOWN).map(error).fold(0.0, f64::max)
}

#[test]
fn known_numbers_are_found_again() {
    let worst = worst_number(0.0);
    assert!(worst < 1e-3, "{worst}");
}

#[test]
fn noise_of_one_percent_moves_them_little() {
    let worst = worst_number(0.01);
    assert!(worst < 0.15, "{worst}");
}
