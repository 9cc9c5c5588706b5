//! The model of NCCL on `a100-node` beside measured all-reduces: tests/a100_node_all_reduce.csv.

use hsdp_simulator::{AllReduceRow, Machine, Time, read_all_reduces};

fn table() -> Vec<(AllReduceRow, Time)> {
    read_all_reduces(include_str!("../a100_node_all_reduce.csv")).expect("a table")
}

fn mean_error(rows: &[(AllReduceRow, Time)]) -> f64 {
    let node = Machine::bundled("a100-node").expect("it is bundled");
    let error = |(row, measured): &(AllReduceRow, Time)| {
        let predicted = row.predict(&node).expect("it fits");
        (predicted.seconds() / measured.seconds() - 1.0).abs()
    };
    rows.iter().map(error).sum::<f64>() / rows.len() as f64
}

#[test]
fn the_mean_error_is_below_six_percent() {
    let rows = table();
    assert_eq!(rows.len(), 77);
    let error = mean_error(&rows);
    assert!(error < 0.06, "{error}");
}

#[test]
fn that_of_sixteen_mebibytes_and_more_is_below_three_percent() {
    let large: Vec<_> = table().into_iter().filter(|(row, _)| row.bytes >= 16 << 20).collect();
    assert_eq!(large.len(), 49);
    let error = mean_error(&large);
    assert!(error < 0.03, "{error}");
}
