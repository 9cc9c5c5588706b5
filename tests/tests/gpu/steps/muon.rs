//! Muon on a device beside Muon on the host: whose products are sums in another order.

use std::collections::BTreeMap;
use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::memory::{self, Category};
use hsdp::{
    AdamW, AdamWOptions, ByteCount, DType, Error, ModelSpec, Muon, MuonOptions, Offload, Param,
    Placement, Precision, ShardedModel, State, StateOver, Unit, World,
};
use hsdp_kernels::{MatrixDType, NewtonSchulz};
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, on_ranks};

use super::super::apart::is_apart;
use super::{DEVICE, PLACES, offloading, placed};

const MESHES: [[usize; 2]; 4] = [[1, 1], [1, 3], [2, 2], [2, 1]];

/// The most by which a parameter may differ after four steps. Each step moves the elements of a
/// matrix by about `RATE`; 1e-6 of a direction's norm for each iteration is the difference of the
/// sums, and later gradients follow the parameters.
const BOUND: f32 = 1e-5;
const RATE: f64 = 0.02;

fn is_matrix(param: &Param) -> bool {
    param.as_matrices().is_some() && !param.name.starts_with("last")
}

/// Wide, tall, stacked and cut matrices, each with a bias that AdamW updates. The matrices of the
/// stack that a rank orthogonalizes together have more elements than any other matrix.
fn spec() -> ModelSpec {
    let stack = Param::new("stack.weight", [6, 20, 16]).matrices(6, 20, 16);
    let spec = ModelSpec::new()
        .unit(layer("wide", [9, 31]))
        .unit(Unit::new("stack").param(stack).param(Param::new("stack.bias", [7])))
        .unit(layer("tall", [45, 11]))
        .unit(layer("last", [6, 6]));
    spec.updated_by(|param| if is_matrix(param) { State::Muon } else { State::Elements(2) })
}

struct Training {
    model: ShardedModel,
    both: (Muon, AdamW),
}

impl Training {
    fn new(
        world: World,
        placement: Placement,
        mesh: [usize; 2],
        dtype: MatrixDType,
    ) -> Result<Self, Error> {
        let precision = Precision { parameters: DType::BF16, ..Precision::default() };
        // Owners are of all ranks, or of a shard group.
        let state = if mesh == [2, 2] { StateOver::World } else { StateOver::Shards };
        let options = hsdp::ModelOptions { precision, state, ..placed(placement, mesh) };
        let model = springs::model_of(world, &spec(), &options)?;
        let newton_schulz = NewtonSchulz { dtype, ..NewtonSchulz::default() };
        let options = MuonOptions { learning_rate: RATE, newton_schulz, ..MuonOptions::default() };
        let changed = |it| MuonOptions { learning_rate: 2.0 * RATE, ..it };
        let muon = Muon::new(&model, options).group(|param| param.name == "tall.weight", changed);
        let adamw = AdamW::new(&model, AdamWOptions::default());
        Ok(Self { model, both: (muon, adamw) })
    }

    fn train(&mut self, steps: usize) -> Result<(), Error> {
        let Self { model, both: (muon, adamw) } = self;
        for _ in 0..steps {
            let gradients = springs::gradients(model, 1)?;
            model.update_by(
                gradients,
                [(&mut *muon, &is_matrix), (&mut *adamw, &|param| !is_matrix(param))],
            )?;
        }
        Ok(())
    }
}

fn compare(found: &BTreeMap<String, Vec<f32>>, expected: &BTreeMap<String, Vec<f32>>, what: &str) {
    let spec = spec();
    for (name, expected) in expected {
        let (_, param) = spec.params().find(|(_, it)| it.name == *name).expect("the parameter");
        assert_ne!(*expected, springs::initial(param), "{name} was updated");
        for (found, expected) in found[name].iter().zip(expected) {
            let difference = (found - expected).abs();
            assert!(difference <= BOUND, "{name}: {found}, not {expected}: {difference}, {what}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn muon_trains_as_on_the_host() {
    let offloaded = offloading(Offload::Optimizer);
    for mesh in MESHES {
        let trained = |placement| {
            common(on_ranks(mesh[0] * mesh[1], |world| {
                let mut training = Training::new(world, placement, mesh, MatrixDType::F32)?;
                training.train(4)?;
                training.model.full_parameters()
            }))
        };
        let [on_host, on_device] = PLACES.map(trained);
        compare(&on_device, &on_host, &format!("{mesh:?}"));
        assert_eq!(trained(offloaded), on_host, "an offloaded update is on the host, {mesh:?}");
    }
}

/// Rounding hides the order of most sums.
#[test]
#[ignore = "needs a CUDA device"]
fn iterations_in_bf16_are_nearly_those_of_the_host() {
    let trained = |placement| {
        common(on_ranks(2, |world| {
            let mut training = Training::new(world, placement, [1, 2], MatrixDType::BF16)?;
            training.train(1)?;
            training.model.full_parameters()
        }))
    };
    let [on_host, on_device] = PLACES.map(trained);
    for (name, expected) in on_host {
        let differences = on_device[&name].iter().zip(&expected).map(|(a, b)| (a - b).abs());
        let most = differences.fold(0.0, f32::max);
        // Two units in the last place of a direction of norm 1, times the largest rate of an
        // element, that of the tall matrix.
        assert!(f64::from(most) <= 2.0 * RATE * (45f64 / 11.0).sqrt() / 128.0, "{name}: {most}");
    }
}

fn resumed(folder: &Path, [from, to]: [Placement; 2]) -> BTreeMap<String, Vec<f32>> {
    let run = |placement, is_new: bool| {
        common(on_ranks(4, |world| {
            let mut training = Training::new(world, placement, [2, 2], MatrixDType::F32)?;
            let mut checkpoints =
                Checkpoints::open(&training.model, folder, CheckpointOptions::default())?;
            if !is_new {
                let loaded = checkpoints.load_latest(&mut training.model, &mut training.both)?;
                assert!(loaded.is_some(), "there is a checkpoint");
            }
            training.train(2)?;
            if is_new {
                checkpoints.save(&training.model, &training.both, &serde_json::Value::Null)?;
            }
            training.model.full_parameters()
        }))
    };
    run(from, true);
    run(to, false)
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_momentum_of_muon_goes_on_elsewhere() {
    let of = |from, to| {
        let folder = tempfile::tempdir().expect("a folder");
        resumed(folder.path(), [from, to])
    };
    let expected = of(Placement::Host, Placement::Host);
    for [from, to] in [[Placement::Host, DEVICE], [DEVICE, Placement::Host], [DEVICE, DEVICE]] {
        compare(&of(from, to), &expected, &format!("from {from:?} to {to:?}"));
    }
}

/// The peaks of the host and of the device in updates, and the plan's.
fn peaks(mesh: [usize; 2]) -> Vec<[[ByteCount; 2]; 2]> {
    memory::reset_peaks();
    on_ranks(mesh[0] * mesh[1], |world| {
        let mut training = Training::new(world, DEVICE, mesh, MatrixDType::F32)?;
        training.train(2)?;
        let rank = training.model.rank();
        let plan = training.model.plan();
        let on_host = memory::usage(rank, Category::Update).peak;
        let on_device = memory::usage_on_device(rank, Category::Update).peak;
        Ok([[on_host, on_device], plan.update(rank).extra_with_device])
    })
}

#[test]
#[ignore = "needs a CUDA device"]
fn muon_takes_the_memory_that_was_planned() {
    if !is_apart("steps::muon::muon_takes_the_memory_that_was_planned") {
        return;
    }
    for mesh in MESHES {
        for (rank, [measured, planned]) in peaks(mesh).into_iter().enumerate() {
            assert_eq!(measured, planned, "host and device, rank {rank} on {mesh:?}");
            assert!(planned.iter().any(|bytes| bytes.get() > 0) || rank > 0, "{mesh:?}");
        }
    }
}
