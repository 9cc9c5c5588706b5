//! The simulator beside published steps: numbers that are fitted to a part of the table predict the rest.

use hsdp_simulator::{
    AllReduceRow, Errors, Fit, Machine, Measurements, StepRow, Time, Workload, fit,
    read_all_reduces, read_steps,
};

/// A node whose links are fitted to all-reduces.
fn node() -> Machine {
    let rows = read_all_reduces(include_str!("../a100_node_all_reduce.csv")).expect("rows");
    let node = Machine::bundled("a100-node").expect("a machine");
    let measurements = Measurements { table: "all-reduces", rows: &rows };
    let predict = |machine: &Machine, row: &AllReduceRow| row.predict(machine);
    fit(&node, &AllReduceRow::NUMBERS, &measurements, predict).expect("a fit").machine
}

fn steps() -> Vec<(Workload, Time)> {
    let rows = read_steps(include_str!("../a100_node_steps.csv")).expect("rows");
    rows.into_iter().map(|(row, time)| (row.workload().expect("a step"), time)).collect()
}

fn fitted(rows: &[(Workload, Time)]) -> Fit {
    let (node, measurements) = (node(), Measurements { table: "steps", rows });
    let predict = |machine: &Machine, workload: &Workload| workload.time(machine);
    fit(&node, StepRow::numbers(&node), &measurements, predict).expect("a fit")
}

/// All steps of the table, on the machine whose numbers were fitted to them.
#[test]
fn the_bundled_node_predicts_the_table() {
    let node = Machine::bundled("a100-node").expect("a machine");
    let all = steps();
    let pair = |(row, time): &(Workload, Time)| (row.time(&node).expect("a time"), *time);
    let errors = Errors::of(all.iter().map(pair));
    assert!(errors.mean() < 0.025 && errors.worst() < 0.07, "{errors:?}");
}

/// The fit simulates some hundred thousand steps: `cargo test --release -p hsdp-simulator --test calibration -- --ignored`.
#[test]
#[ignore = "takes a minute with optimization, and ten without"]
fn steps_that_are_left_out_are_predicted() {
    let all = steps();
    let (left_out, others): (Vec<_>, Vec<_>) =
        all.into_iter().enumerate().partition(|(number, _)| number % 3 == 0);
    let [left_out, others] =
        [left_out, others].map(|rows| rows.into_iter().map(|it| it.1).collect::<Vec<_>>());
    let fit = fitted(&others);
    assert!(fit.numbers.len() + AllReduceRow::NUMBERS.len() <= 12);
    let pair = |(row, time): &(Workload, Time)| (row.time(&fit.machine).expect("a time"), *time);
    let errors = Errors::of(left_out.iter().map(pair));
    println!(
        "{} steps, mean error {:.2} %, worst {:.2} %",
        left_out.len(),
        100.0 * errors.mean(),
        100.0 * errors.worst()
    );
    assert!(errors.mean() < 0.03 && errors.worst() < 0.08, "{errors:?}");
}
