//! Published times of steps on clusters: the computation and the network that some of them imply predict the others.

mod deferred;
mod nodes;

use hsdp_simulator::{Machine, Workload};

const BANDWIDTH: &str = "links.network.bandwidth";
const EFFICIENCY: &str = "compute.efficiency";

/// Seconds of a step.
fn seconds(machine: &Machine, step: &Workload) -> f64 {
    step.predict(machine).expect("a prediction").timing.step.seconds()
}

fn value(machine: &Machine, name: &str) -> f64 {
    machine.numbers().into_iter().find(|it| it.name == name).expect("a number").value
}

/// Multiplies a number of the machine.
fn scale(machine: &mut Machine, name: &str, by: f64) {
    machine.set(name, value(machine, name) * by, "published steps").expect("possible");
}

/// Gb/s between the machines, in one direction.
fn gigabits(machine: &Machine) -> f64 {
    let parts = [BANDWIDTH, "links.network.efficiency"];
    parts.map(|name| value(machine, name)).iter().product::<f64>() * 8e-9
}
