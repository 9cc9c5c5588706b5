//! An optimizer of the program's own sees no gradient before it is clipped.

use hsdp::{DeviceRun, Run};

fn slice(run: Run<'_>) -> f32 {
    run.gradient[0]
}

fn values(run: &Run<'_>) -> f32 {
    run.gradient.values[0]
}

fn by_device(run: DeviceRun<'_>) -> f64 {
    run.update.divisor
}

fn main() {}
