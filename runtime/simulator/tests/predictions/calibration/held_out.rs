//! Steps that were left out of a fit.

use hsdp_simulator::{AllReduceRow, Errors, Machine, Time};

use super::closed_form::{Measured, STEPS, a100_with_links, fitted, steps};

type Steps = Vec<(Measured, Time)>;

type Property = fn(&Measured) -> usize;

/// The steps that are left out, and all others.
fn split(is_left_out: impl Fn(usize, &Measured) -> bool) -> [Steps; 2] {
    let numbered = steps(STEPS).into_iter().enumerate();
    let (left_out, others): (Vec<_>, Vec<_>) =
        numbered.partition(|(number, (row, _))| is_left_out(*number, row));
    [left_out, others].map(|part| part.into_iter().map(|(_, row)| row).collect())
}

/// The mean error on the steps that are left out, of a fit to all others.
fn error(machine: &Machine, is_left_out: impl Fn(usize, &Measured) -> bool) -> f64 {
    let [left_out, others] = split(is_left_out);
    assert!(others.len() >= 50 && left_out.len() >= 10, "{} {}", others.len(), left_out.len());
    let fit = fitted(machine, &others).expect("a fit");
    let predict =
        |(row, time): &_| (Measured::predict(&fit.machine, row).expect("a prediction"), *time);
    Errors::of(left_out.iter().map(predict)).mean()
}

#[test]
fn two_numbers_fit_all_reduces() {
    let links = a100_with_links();
    assert!(links.errors.mean() < 0.06, "{}", links.errors.mean());
}

#[test]
fn eight_numbers_fit_all_steps_and_are_possible() {
    let fit = fitted(&a100_with_links().machine, &steps(STEPS)).expect("a fit");
    let of = |name: &str| {
        fit.numbers.iter().map(|it| &it.number).find(|it| it.name == name).expect("fitted").value
    };
    assert!(fit.numbers.len() + AllReduceRow::NUMBERS.len() <= 12);
    let mean = fit.errors.mean();
    let worst = fit.errors.worst();
    assert!(mean < 0.02 && worst < 0.06, "mean {mean}, worst {worst}");
    assert!((0.7..0.9).contains(&of("compute.efficiency")));
    assert!((0.2..0.4).contains(&of("compute.unaligned")), "odd rows of 50,257 elements");
    assert!((0.6..0.95).contains(&of("memory.efficiency")));
    assert!((10e-6..50e-6).contains(&of("compute.launch")), "eager PyTorch");
    assert!((2e-6..20e-6).contains(&of("compute.kernel")));
}

#[test]
fn halves_predict_each_other() {
    let machine = a100_with_links().machine;
    for multiplier in [7, 11] {
        let half =
            |parity: usize| move |number: usize, _: &_| number * multiplier % 13 % 2 == parity;
        let errors = [0, 1].map(|parity| error(&machine, half(parity)));
        assert!(errors.iter().all(|error| *error < 0.025), "{errors:?}");
    }
}

/// Batches of 4 and 8, the depth 24 and 8 ranks need not be among the measurements.
#[test]
fn steps_of_another_kind_are_predicted() {
    let machine = a100_with_links().machine;
    let cases: [(&str, Property, usize); 4] = [
        ("micro_batch", |it| it.row.batch.sequences, 4),
        ("micro_batch", |it| it.row.batch.sequences, 8),
        ("layers", |it| it.row.model.layers, 24),
        ("gpus", |it| it.row.ranks, 8),
    ];
    for (name, of, value) in cases {
        let error = error(&machine, |_, row| of(row) == value);
        println!("without {name} {value}: {:.2} %", 100.0 * error);
        assert!(error < 0.048, "without {name} {value}: {error}");
    }
}
