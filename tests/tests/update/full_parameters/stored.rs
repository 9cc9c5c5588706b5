//! Frozen parameters that are stored in the compute dtype alone: their values are those of `init`,
//! rounded once, wherever they are read, and training with them gives the bits of training with f32
//! masters.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Import};
use hsdp::{
    AdamW, AdamWOptions, DType, Error, FullCopies, LossSum, Mesh, ModelOptions, ModelSpec,
    Optimizer, Param, Precision, ShardedModel, StepOptions, Unit, Unused, World,
};
use hsdp_checkpoint::{Disk, Store, Weights, export};
use hsdp_kernels::Wire;
use hsdp_sharding::Role;
use hsdp_tests::support::models::{layer, storing_frozen};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, meshes, on_ranks, outcomes};
use serde_json::Value;

type Parameters = BTreeMap<String, Vec<f32>>;

const MESHES: [(usize, usize); 6] = [(1, 1), (1, 3), (3, 1), (2, 2), (1, 8), (2, 3)];

/// A unit with trained parameters between frozen ones, a frozen one of whole rows, and one with f32
/// masters only.
fn masters() -> ModelSpec {
    let mixed = Unit::new("mixed")
        .param(Param::new("mixed.table", [211]).frozen())
        .param(Param::new("mixed.weight", [37, 19]))
        .param(Param::new("mixed.scale", [1]).frozen());
    let still = Unit::new("still").param(Param::new("still.weight", [40, 9]).frozen().rows(8));
    ModelSpec::new().unit(mixed).unit(still).unit(layer("last", [13, 7]))
}

/// The same, whose frozen parameters have no master.
fn stored(dtype: DType) -> ModelSpec {
    storing_frozen(&masters(), dtype)
}

/// Values that no 16-bit dtype has, of all magnitudes.
fn initial(param: &Param) -> Vec<f32> {
    let value = |at: usize| (1.0 + at as f32 / 1024.0).powf((at % 9) as f32 - 4.0) / 3.0;
    (0..param.numel()).map(value).collect()
}

fn rounded(dtype: DType) -> Parameters {
    let wire = Wire::try_from(dtype).expect("a dtype of training");
    let of = |param: &Param| match param.role {
        Role::Trainable => initial(param),
        Role::Frozen => initial(param).into_iter().map(|value| wire.round(value)).collect(),
    };
    masters().params().map(|(_, param)| (param.name.clone(), of(param))).collect()
}

fn options(dtype: DType, mesh: Mesh) -> ModelOptions {
    let precision = Precision::compute_in(dtype);
    let unused = Unused::Zeros;
    ModelOptions { precision, unused, ..ModelOptions::on(mesh) }
}

fn model(world: World, spec: ModelSpec, options: &ModelOptions) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, spec, options.clone(), initial)
}

fn adamw(model: &ShardedModel) -> AdamW {
    AdamW::new(model, AdamWOptions { learning_rate: 0.05, ..AdamWOptions::default() })
}

/// The bits of the loss of each step: those of a model with springs, which pull at the gathered
/// parameters.
fn train(model: &mut ShardedModel, adamw: &mut AdamW) -> Result<Vec<u64>, Error> {
    let mut losses = Vec::new();
    for _ in 0..2 {
        let gradients = springs::gradients(model, 1)?;
        losses.push(gradients.loss().to_bits());
        adamw.step(model, gradients)?;
    }
    Ok(losses)
}

/// Losses and parameters after training.
fn trained(spec: &ModelSpec, options: &ModelOptions) -> (Vec<u64>, Parameters) {
    common(on_ranks(options.mesh.world_size(), |world| {
        let mut model = model(world, spec.clone(), options)?;
        let mut adamw = adamw(&model);
        Ok((train(&mut model, &mut adamw)?, model.full_parameters()?))
    }))
}

#[test]
fn they_are_rounded_once_on_every_mesh() {
    for dtype in [DType::BF16, DType::F16] {
        for mesh in meshes(MESHES) {
            let options = options(dtype, mesh);
            let full = on_ranks(options.mesh.world_size(), |world| {
                model(world, stored(dtype), &options)?.full_parameters()
            });
            assert!(common(full) == rounded(dtype), "{dtype}, {mesh}");
        }
    }
}

#[test]
fn training_gives_the_bits_of_training_with_masters_on_every_mesh() {
    for dtype in [DType::BF16, DType::F16] {
        for mesh in meshes(MESHES) {
            for full_copies in FullCopies::ALL {
                let options = ModelOptions { full_copies, ..options(dtype, mesh) };
                let (losses, parameters) = trained(&stored(dtype), &options);
                let (expected, with_masters) = trained(&masters(), &options);
                assert_eq!(losses, expected, "{dtype}, {mesh}");
                let frozen = rounded(dtype);
                for (_, param) in masters().params() {
                    let expected = match param.role {
                        Role::Trainable => &with_masters[&param.name],
                        Role::Frozen => &frozen[&param.name],
                    };
                    assert!(parameters[&param.name] == *expected, "{}, {mesh}", param.name);
                }
            }
        }
    }
}

/// Also of a copy that was written while training went on.
#[test]
fn a_checkpoint_has_their_values_in_f32_and_goes_on_on_another_mesh() {
    let dtype = DType::BF16;
    for in_background in [false, true] {
        let folder = tempfile::tempdir().expect("a folder");
        let saved = on_ranks(6, |world| {
            let mut model = model(world, stored(dtype), &options(dtype, mesh(2, 3)))?;
            let mut adamw = adamw(&model);
            train(&mut model, &mut adamw)?;
            let mut checkpoints = open(&model, folder.path())?;
            if in_background {
                checkpoints.save_in_background(&model, &adamw, &Value::Null)?;
                checkpoints.finish(&model)?;
            } else {
                checkpoints.save(&model, &adamw, &Value::Null)?;
            }
            model.full_parameters()
        });
        let saved = common(saved);
        assert!(saved["still.weight"] == rounded(dtype)["still.weight"]);
        assert!(saved_on_disk(folder.path()) == saved);
        for (replicate, shard) in [(1, 1), (1, 8), (3, 1)] {
            let loaded = on_ranks(replicate * shard, |world| {
                let options = options(dtype, mesh(replicate, shard));
                let zeros = |param: &Param| vec![0.0; param.numel()];
                let mut model = ShardedModel::new(world, stored(dtype), options, zeros)?;
                let mut adamw = adamw(&model);
                open(&model, folder.path())?.load(&mut model, &mut adamw, 2)?;
                gathers_what_it_has(&mut model)?;
                model.full_parameters()
            });
            assert!(common(loaded) == saved, "{replicate}x{shard}");
        }
    }
}

fn open(model: &ShardedModel, folder: &Path) -> Result<Checkpoints, Error> {
    Checkpoints::open(model, folder, CheckpointOptions::default())
}

/// All parameters of the checkpoint, as f32 tensors.
fn saved_on_disk(folder: &Path) -> Parameters {
    let store = Store::new(folder, Arc::new(Disk));
    let generation = store.latest().expect("read").expect("there");
    let read = |(_, param): (_, &Param)| {
        let entry = &generation.manifest().tensors[&param.name];
        assert_eq!(entry.dtype, safetensors::Dtype::F32);
        let mut values = vec![0.0; param.numel()];
        generation.read(&param.name, 0, &mut values).expect("read");
        (param.name.clone(), values)
    };
    masters().params().map(read).collect()
}

/// Compares every unit as it is gathered with the full parameters.
fn gathers_what_it_has(model: &mut ShardedModel) -> Result<(), Error> {
    let full = model.full_parameters()?;
    let spec = masters();
    let wire = Wire::try_from(model.options().precision.parameters)?;
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let mut pass = step.microbatch()?;
    for id in spec.unit_ids() {
        let gathered = pass.unshard(id)?;
        for (index, param) in spec[id].params.iter().enumerate() {
            let expected: Vec<f32> =
                full[&param.name].iter().map(|value| wire.round(*value)).collect();
            assert!(gathered.values(index).to_f32() == expected, "{}", param.name);
        }
    }
    let _ = pass.loss(LossSum::new(0.0, 1))?;
    pass.finish()?;
    step.finish().map(drop)
}

/// A folder, and a checkpoint of a model with f32 masters, have values that are rounded where they
/// are read.
#[test]
fn what_is_read_in_f32_is_rounded_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = folder.path().join("store");
    on_ranks(2, |world| {
        let model = model(world, masters(), &options(DType::BF16, mesh(1, 2)))?;
        open(&model, &store)?.save(&model, &adamw(&model), &Value::Null)
    });
    let generation = Store::new(&store, Arc::new(Disk)).latest().expect("read").expect("there");
    export(&generation, &Disk, &folder.path().join("model"), Weights::Trained, u64::MAX)
        .expect("exported");
    let from = Import::of(&folder.path().join("model"));
    for dtype in [DType::BF16, DType::F16] {
        for mesh in meshes(MESHES) {
            let options = options(dtype, mesh);
            let found = on_ranks(options.mesh.world_size(), |world| {
                let mut imported =
                    ShardedModel::import(world, stored(dtype), options.clone(), &from)?.model;
                let full = imported.full_parameters()?;
                let mut adamw = adamw(&imported);
                open(&imported, &store)?.load(&mut imported, &mut adamw, 0)?;
                assert!(imported.full_parameters()? == full);
                Ok(full)
            });
            assert!(common(found) == rounded(dtype), "{dtype}, {mesh}");
        }
    }
}

/// A change of a single bit that rounding leaves shows, and another does not.
#[test]
fn replicas_compare_their_bits() {
    let options = options(DType::BF16, mesh(2, 1));
    let made = |value: f32| {
        outcomes(2, |world| {
            let is_other = world.rank().index() == 1;
            let init = |param: &Param| match &*param.name {
                "still.weight" if is_other => vec![value; param.numel()],
                _ => vec![1.0; param.numel()],
            };
            ShardedModel::new(world, stored(DType::BF16), options.clone(), init).map(drop)
        })
    };
    assert!(made(1.0 + f32::EPSILON).into_iter().all(|made| made.is_ok()));
    let told = common_error(made(1.01)).to_string();
    assert!(told.contains("the initial value of a parameter differs"), "{told}");
}

#[test]
fn a_rank_that_has_masters_is_named() {
    let options = options(DType::BF16, mesh(1, 2));
    let told = common_error(outcomes(2, |world| {
        let spec = if world.rank().index() == 1 { stored(DType::BF16) } else { masters() };
        model(world, spec, &options).map(drop)
    }));
    let told = told.to_string();
    let expected = "rank 1 has parameter `mixed.table` [211], frozen, stored in bf16 in unit 0, rank 0 has parameter `mixed.table` [211], frozen in unit 0";
    assert!(told.contains(expected), "{told}");
}

#[test]
fn a_plan_that_gathers_in_another_dtype_refuses_them() {
    let options = options(DType::F32, mesh(1, 1));
    let refused = model(World::single(), stored(DType::BF16), &options).expect_err("f32");
    let expected = "parameter `mixed.table`, stored in bf16: its unit is gathered in f32";
    assert!(refused.to_string().contains(expected), "{refused}");
}
