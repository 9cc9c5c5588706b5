//! The simulator beside published steps: numbers that are fitted to a part of the table predict the rest.

use hsdp_simulator::{Errors, Fit, Machine, Time, Workload, fit, read_all_reduces, read_steps};

use crate::closed_form::{COMPUTATION, LINKS};

fn predict(machine: &Machine, workload: &Workload) -> Result<Time, hsdp_simulator::Error> {
    Ok(workload.predict(machine)?.timing.step)
}

/// A node whose links are fitted to all-reduces.
fn node() -> Machine {
    let rows = read_all_reduces(include_str!("../a100_node_all_reduce.csv")).expect("rows");
    let node = Machine::bundled("a100-node").expect("a machine");
    let links = ["calls.start", "links.machine.efficiency"];
    fit(&node, &links, &rows, |machine, row| row.predict(machine)).expect("a fit").machine
}

fn steps() -> Vec<(Workload, Time)> {
    let rows = read_steps(include_str!("../a100_node_steps.csv")).expect("rows");
    rows.into_iter().map(|(row, time)| (row.workload().expect("a step"), time)).collect()
}

fn fitted(rows: &[(Workload, Time)]) -> Fit {
    fit(&node(), &COMPUTATION, rows, predict).expect("a fit")
}

/// All steps of the table, on the machine whose numbers were fitted to them.
#[test]
fn the_bundled_node_predicts_the_table() {
    let node = Machine::bundled("a100-node").expect("a machine");
    let all = steps();
    let pair = |(row, time): &(Workload, Time)| (predict(&node, row).expect("a time"), *time);
    let errors = Errors::of(all.iter().map(pair));
    assert!(errors.mean() < 0.025 && errors.worst() < 0.07, "{errors:?}");
}

/// The fit simulates some hundred thousand steps: `cargo test --release -p hsdp-simulator --test calibration -- --ignored`.
#[test]
#[ignore = "takes a minute with optimization, and ten without"]
fn steps_that_are_left_out_are_predicted() {
    assert!(COMPUTATION.len() + LINKS.len() <= 12);
    let all = steps();
    let (left_out, others): (Vec<_>, Vec<_>) =
        all.into_iter().enumerate().partition(|(number, _)| number % 3 == 0);
    let [left_out, others] =
        [left_out, others].map(|rows| rows.into_iter().map(|it| it.1).collect::<Vec<_>>());
    let fit = fitted(&others);
    let pair =
        |(row, time): &(Workload, Time)| (predict(&fit.machine, row).expect("a time"), *time);
    let errors = Errors::of(left_out.iter().map(pair));
    println!(
        "{} steps, mean error {:.2} %, worst {:.2} %",
        left_out.len(),
        100.0 * errors.mean(),
        100.0 * errors.worst()
    );
    assert!(errors.mean() < 0.03 && errors.worst() < 0.08, "{errors:?}");
}
