//! The model of NCCL on `a100-node` beside measured all-reduces: tests/a100_node_all_reduce.csv, whose columns are the number of cards, the bytes
//! of a buffer, and the time in us.

use hsdp_sharding::Mesh;
use hsdp_simulator::{Collective, Machine, Shapes, collective_cost};

struct Measured {
    cards: usize,
    bytes: u64,
    seconds: f64,
}

fn table() -> Vec<Measured> {
    let lines = include_str!("a100_node_all_reduce.csv").lines().skip(1);
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        let [cards, bytes, us] = fields[..] else { panic!("{line}") };
        let us: f64 = us.parse().expect("a time");
        Measured {
            cards: cards.parse().expect("a number of cards"),
            bytes: bytes.parse().expect("a number of bytes"),
            seconds: us * 1e-6,
        }
    };
    lines.map(row).collect()
}

/// Predicted over measured time.
fn ratio(node: &Machine, row: &Measured) -> f64 {
    let mesh = Mesh::new(1, row.cards).expect("a mesh");
    let world = Shapes::new(mesh, node).expect("it fits").world();
    let cost = collective_cost(node, &world, Collective::AllReduce, row.bytes);
    cost.time.seconds() / row.seconds
}

fn mean_error(rows: &[Measured]) -> f64 {
    let node = Machine::bundled("a100-node").expect("it is bundled");
    let errors = rows.iter().map(|row| (ratio(&node, row) - 1.0).abs());
    errors.sum::<f64>() / rows.len() as f64
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
    let large: Vec<_> = table().into_iter().filter(|row| row.bytes >= 16 << 20).collect();
    assert_eq!(large.len(), 49);
    let error = mean_error(&large);
    assert!(error < 0.03, "{error}");
}
