//! Sharded training against unsharded training of the same model on the same items.
//!
//! All ranks are bit-identical first. Then the sharded run equals, bit for bit, a baseline without
//! shards, threads or collectives, that adds the ranks' gradients in the same order: in rank order
//! within a shard group, then over the microbatches, then over the replicas.

mod baseline;
mod mlp;
mod mlp_runs;
mod weights;

use std::collections::BTreeMap;

use hsdp::Mesh;
use hsdp_tests::support::worlds::mesh;

/// The meshes of all parity tests: with one axis, with the other, with both, and not only in powers
/// of two.
fn meshes() -> [Mesh; 6] {
    [mesh(1, 1), mesh(1, 4), mesh(2, 2), mesh(4, 1), mesh(2, 3), mesh(3, 2)]
}

/// Parameters or gradients by name.
type Named = BTreeMap<String, Vec<f32>>;

/// What one step of a run ends with.
#[derive(Clone, Debug, PartialEq)]
struct Trace {
    loss: f64,
    norm: f64,
    gradients: Named,
    parameters: Named,
}

/// Fails at the first element in which two tensors differ in a bit.
fn assert_same_bits(got: &Named, expected: &Named, context: &str) {
    assert!(
        got.keys().eq(expected.keys()),
        "{context}: {:?} and {:?}",
        got.keys(),
        expected.keys()
    );
    for (name, values) in got {
        let pairs = values.iter().zip(&expected[name]).enumerate();
        assert_eq!(values.len(), expected[name].len(), "{context}: {name}");
        for (index, (got, expected)) in pairs {
            assert_eq!(
                got.to_bits(),
                expected.to_bits(),
                "{context}: {name}[{index}]: got {got}, the baseline has {expected}"
            );
        }
    }
}

/// Fails unless two f64 agree up to the order of their additions.
fn assert_near(got: f64, expected: f64, context: &str) {
    let near = (got - expected).abs() <= 1e-13 * expected.abs();
    assert!(near, "{context}: got {got}, the baseline has {expected}");
}
