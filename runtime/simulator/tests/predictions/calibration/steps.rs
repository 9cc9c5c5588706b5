//! The simulator beside published steps. `cargo bench --bench predictions` fits a part of the table, and predicts the rest.

use hsdp_simulator::{Errors, Machine, Time, Workload, read_steps};

fn steps() -> Vec<(Workload, Time)> {
    let rows = read_steps(include_str!("../../a100_node_steps.csv")).expect("rows");
    rows.into_iter().map(|(row, time)| (row.workload().expect("a step"), time)).collect()
}

/// All steps of the table, on the machine whose numbers were fitted to them.
#[test]
fn the_bundled_node_predicts_the_table() {
    let node = Machine::bundled("a100-node").expect("a machine");
    let all = steps();
    let pair = |(row, time): &(Workload, Time)| {
        (row.predict(&node).expect("a prediction").timing.step, *time)
    };
    let errors = Errors::of(all.iter().map(pair));
    assert!(errors.mean() < 0.025 && errors.worst() < 0.07, "{errors:?}");
}
