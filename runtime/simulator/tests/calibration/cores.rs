//! Steps of the example's GPT on two cores, as `benches/cpu_steps.sh` measured them: numbers that are fitted to one table predict the other, in
//! which no model has a width, a context or a number of blocks of the first.

use hsdp_simulator::{Errors, Machine, Measurements, StepRow, Time, Workload, fit, read_steps};

fn steps(table: &str) -> Vec<(Workload, Time)> {
    let rows = read_steps(table).expect("rows");
    rows.into_iter().map(|(row, time)| (row.workload().expect("a step"), time)).collect()
}

fn predict(machine: &Machine, step: &Workload) -> Result<Time, hsdp_simulator::Error> {
    step.time(machine)
}

#[test]
fn steps_of_other_sizes_are_predicted() {
    let cores = Machine::bundled("two-core-cpu").expect("a machine");
    let rows = steps(include_str!("../cpu_steps.csv"));
    let measured = Measurements { table: "cpu_steps.csv", rows: &rows };
    let fit = fit(&cores, StepRow::numbers(&cores), &measured, predict).expect("a fit");
    let others = steps(include_str!("../cpu_held_out.csv"));
    let pair = |(step, time): &(Workload, Time)| {
        (predict(&fit.machine, step).expect("a prediction"), *time)
    };
    let errors = Errors::of(others.iter().map(pair));
    let (mean, worst) = (100.0 * errors.mean(), 100.0 * errors.worst());
    println!("{} steps, mean error {mean:.2} %, worst {worst:.2} %", others.len());
    assert!(mean < 8.0 && worst < 20.0, "{errors:?}");
}
