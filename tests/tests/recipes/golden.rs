//! A training by PyTorch of a convolutional net with batch norm, repeated on meshes. The statistics
//! of its norms are those of the whole batch, which the ranks divide.

use std::path::Path;

use hsdp::Mesh;
use hsdp_tests::golden::batch_norm::{Activations, Compared, GoldenRun, Outcome};

const KINDS: [Compared; 6] = [
    Compared::Losses,
    Compared::Norms,
    Compared::HeldOut,
    Compared::Evaluation,
    Compared::RunningStatistics,
    Compared::MeanBehindBias,
];

fn golden() -> GoldenRun {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_batchnorm");
    GoldenRun::read(&folder).expect("a golden run")
}

/// Trains on a mesh, and asserts that no number differs by more than rounding explains.
fn train(golden: &GoldenRun, mesh: &str, activations: Activations) -> Outcome {
    let sizes: Mesh = mesh.parse().expect("a mesh");
    let outcome = golden.train(sizes, activations).expect("a training");
    let differences = golden.differences(&outcome).expect("tensors of one net");
    let compared: Vec<_> = differences.iter().map(|it| it.compared).collect();
    assert_eq!(compared, KINDS, "on {mesh}");
    for difference in differences {
        assert!(difference.of_bound() <= 1.0, "on {mesh}, {activations:?}: {difference}");
    }
    outcome
}

#[test]
fn a_training_by_pytorch_is_repeated_on_each_mesh() {
    let _turn = crate::beside_others();
    let golden = golden();
    for mesh in ["1x1", "1x2", "4x1"] {
        train(&golden, mesh, Activations::Kept);
    }
    let kept = train(&golden, "2x2", Activations::Kept);
    let recomputed = train(&golden, "2x2", Activations::Recomputed);
    assert!(recomputed == kept, "recomputation changes no bit");
}

/// A batch has 24 items: five ranks have four or five each, and of 25 ranks one has none.
#[test]
fn ranks_need_not_have_equal_parts() {
    let _turn = crate::beside_others();
    let golden = golden();
    train(&golden, "1x5", Activations::Kept);
    train(&golden, "5x5", Activations::Recomputed);
}
