//! The names of computation and of operations, with the names of units.

use hsdp_sharding::{ModelSpec, UnitId};

use crate::host::{Operation, Work};

/// The name of computation: `forward layers.3`.
pub(super) fn of_work(spec: &ModelSpec, work: Work) -> String {
    let of = |verb: &str, unit: UnitId| format!("{verb} {}", spec[unit].name);
    match work {
        Work::Forward(unit) => of("forward", unit),
        Work::Backward(unit) => of("backward", unit),
        Work::Accumulate(unit) => of("accumulate", unit),
        Work::Fold(unit) => of("fold", unit),
        Work::Loss => "loss".to_owned(),
        Work::Norm => "norm".to_owned(),
        Work::Update => "update".to_owned(),
    }
}

/// The name of an operation: `reduce_scatter layers.3`, `all_gather header`.
pub(super) fn of_operation(spec: &ModelSpec, operation: &Operation) -> String {
    let Operation { op, stage, unit, .. } = operation;
    unit.map_or_else(|| format!("{op} {stage}"), |unit| format!("{op} {}", spec[unit].name))
}
