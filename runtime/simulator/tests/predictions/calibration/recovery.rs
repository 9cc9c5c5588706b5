//! Numbers that are found again from the steps that they predict.

use hsdp_simulator::{Fitted, Machine, StepRow, Time};

use super::closed_form::{Measured, STEPS, fitted, steps};

const KNOWN: [f64; 6] = [0.8, 0.7, 0.25, 4e9, 20e-6, 6e-6];

/// The steps of the table, as they would be on a machine with the known numbers, each longer or shorter by up to `noise`.
fn generated(noise: f64) -> (Machine, Vec<(Measured, Time)>) {
    let machine = Machine::bundled("a100-node").expect("bundled");
    let mut known = machine.clone();
    for (name, value) in StepRow::numbers(&machine).iter().zip(KNOWN) {
        known.set(name, value, "known").expect("possible");
    }
    let generate = |(number, (row, _)): (usize, (Measured, Time))| {
        let time = Measured::predict(&known, &row).expect("a prediction").seconds();
        let wave = (number as f64 * 2.4).sin();
        (row, Time::from_seconds(time * noise.mul_add(wave, 1.0)).expect("a time"))
    };
    (machine, steps(STEPS).into_iter().enumerate().map(generate).collect())
}

/// The errors of numbers that are fitted to such steps, with their standard errors.
fn errors(noise: f64) -> Vec<(f64, f64)> {
    let (machine, steps) = generated(noise);
    let fit = fitted(&machine, &steps).expect("a fit");
    assert!(fit.errors.mean() <= noise + 1e-4, "{}", fit.errors.mean());
    let error = |(fitted, known): (&Fitted, f64)| {
        ((fitted.number.value / known - 1.0).abs(), fitted.standard_error)
    };
    fit.numbers.iter().zip(KNOWN).map(error).collect()
}

#[test]
fn known_numbers_are_found_again() {
    let errors = errors(0.0);
    assert!(errors.iter().all(|(error, standard)| error.max(*standard) < 1e-3), "{errors:?}");
}

#[test]
fn noise_of_one_percent_moves_them_little() {
    let errors = errors(0.01);
    assert!(errors.iter().all(|(error, _)| *error < 0.15), "{errors:?}");
}

#[test]
fn standard_errors_tell_how_far() {
    for noise in [0.001, 0.01] {
        let errors = errors(noise);
        assert!(errors.iter().all(|(error, standard)| *error < 3.0 * standard), "{errors:?}");
        assert!(errors.iter().all(|(_, standard)| *standard < 30.0 * noise), "{errors:?}");
    }
}
