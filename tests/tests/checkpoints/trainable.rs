//! Checkpoints of the trainable parameters alone: they go on upon the same frozen parameters, on
//! any mesh, and upon no others.

use std::path::Path;
use std::sync::Arc;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Content};
use hsdp::{
    AdamW, AdamWOptions, DType, Error, Mesh, ModelOptions, ModelSpec, Param, Precision,
    ShardedModel, Unit, World,
};
use hsdp_checkpoint::{Disk, Generation, Store};
use hsdp_sharding::Role;
use hsdp_tests::support::models::storing_frozen;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, meshes, on_ranks, outcomes};
use serde_json::Value;

use super::training::{Training, cursor, spec};

fn open(model: &ShardedModel, folder: &Path, content: Content) -> Result<Checkpoints, Error> {
    Checkpoints::open(model, folder, CheckpointOptions { content, ..CheckpointOptions::default() })
}

/// A model, and the precision in which it trains.
struct SpecAndPrecision {
    spec: ModelSpec,
    precision: Precision,
}

/// Returns a model whose frozen parameters are stored in bf16 alone, or have masters.
fn with(is_stored: bool) -> SpecAndPrecision {
    if !is_stored {
        return SpecAndPrecision { spec: spec(), precision: Precision::default() };
    }
    let spec = storing_frozen(&spec(), DType::BF16);
    SpecAndPrecision { spec, precision: Precision::compute_in(DType::BF16) }
}

fn training(
    world: World,
    of: SpecAndPrecision,
    mesh: Mesh,
    init: impl FnMut(&Param) -> Vec<f32>,
) -> Result<Training, Error> {
    let options = ModelOptions { precision: of.precision, ..ModelOptions::on(mesh) };
    Ok(Training::of(ShardedModel::new(world, of.spec, options, init)?))
}

/// The frozen parameters of the model, and zeros for the trained ones.
fn base(param: &Param) -> Vec<f32> {
    match param.role {
        Role::Trainable => vec![0.0; param.numel()],
        Role::Frozen => springs::initial(param),
    }
}

fn saved_after_two_steps(folder: &Path, mesh: Mesh) {
    on_ranks(mesh.world_size(), |world| {
        let mut training = training(world, with(false), mesh, springs::initial)?;
        training.train(2)?;
        let mut checkpoints = open(&training.model, folder, Content::Trainable)?;
        training.save(&mut checkpoints)
    });
}

fn latest(folder: &Path) -> Generation {
    Store::new(folder, Arc::new(Disk)).latest().expect("read").expect("there")
}

#[test]
fn training_goes_on_bit_for_bit_upon_the_base() {
    for is_stored in [false, true] {
        for in_background in [false, true] {
            let folder = tempfile::tempdir().expect("a folder");
            let saved = on_ranks(4, |world| {
                let mut training = training(world, with(is_stored), mesh(2, 2), springs::initial)?;
                let mut checkpoints = open(&training.model, folder.path(), Content::Trainable)?;
                training.train(2)?;
                if in_background {
                    training.save_in_background(&mut checkpoints)?;
                    checkpoints.finish(&training.model)?;
                } else {
                    training.save(&mut checkpoints)?;
                }
                Ok((training.train(2)?, training.bits()?))
            });
            let resumed = on_ranks(4, |world| {
                let mut training = training(world, with(is_stored), mesh(2, 2), base)?;
                let mut checkpoints = open(&training.model, folder.path(), Content::Trainable)?;
                let Training { model, optimizer } = &mut training;
                let resumed = checkpoints.load_latest(model, optimizer)?.expect("there is one");
                assert_eq!((resumed.step, resumed.user), (2, cursor(2)));
                Ok((training.train(2)?, training.bits()?))
            });
            assert_eq!(saved, resumed, "stored {is_stored}, in the background {in_background}");
        }
    }
}

#[test]
fn every_mesh_reads_what_every_mesh_wrote() {
    const MESHES: [(usize, usize); 5] = [(1, 1), (1, 3), (3, 1), (2, 2), (1, 8)];
    for from in meshes(MESHES) {
        let folder = tempfile::tempdir().expect("a folder");
        saved_after_two_steps(folder.path(), from);
        for to in meshes(MESHES) {
            let loaded = on_ranks(to.world_size(), |world| {
                let mut training = training(world, with(false), to, base)?;
                let mut checkpoints = open(&training.model, folder.path(), Content::Trainable)?;
                checkpoints.load(&mut training.model, &mut training.optimizer, 2)?;
                training.model.full_parameters()
            });
            for (name, values) in common(loaded) {
                let Some(tensor) = latest(folder.path()).manifest().tensors.get(&name).cloned()
                else {
                    let spec = spec();
                    let param = &spec[spec.find(&name).expect("a parameter")];
                    assert!(param.role == Role::Frozen && values == springs::initial(param));
                    continue;
                };
                let numel = usize::try_from(tensor.numel().expect("small")).expect("small");
                let mut expected = vec![0.0; numel];
                latest(folder.path()).read(&name, 0, &mut expected).expect("read");
                assert!(values == expected, "{name}, {from} to {to}");
            }
        }
    }
}

#[test]
fn the_files_have_no_frozen_parameter_and_every_mesh_the_same_digest() {
    let mut digests = Vec::new();
    for mesh in meshes([(1, 1), (1, 3), (3, 1), (2, 2), (1, 8)]) {
        let folder = tempfile::tempdir().expect("a folder");
        saved_after_two_steps(folder.path(), mesh);
        let generation = latest(folder.path());
        let manifest = generation.manifest();
        digests.push(manifest.frozen_digest.expect("frozen parameters are left out"));
        let parameters: Vec<&str> = manifest.tensors.keys().map(|name| &**name).collect();
        assert!(
            parameters.contains(&"mixed.weight")
                && parameters.contains(&"optimizer:exp_avg:mixed.weight")
        );
        assert!(!parameters.contains(&"mixed.table") && !parameters.contains(&"still.weight"));
        let updates = &manifest.optimizer.as_ref().expect("it is saved").updates;
        assert_eq!((updates.get("mixed.weight"), updates.get("mixed.table")), (Some(&2), None));
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:#x?}");
}

/// The error with which a load ends upon a base, on all ranks. Nothing has changed then.
fn refused(
    folder: &Path,
    content: Content,
    init: impl Fn(&Param) -> Vec<f32> + Sync,
) -> Option<String> {
    let told = on_ranks(2, |world| {
        let mut training = training(world, with(false), mesh(1, 2), &init)?;
        let mut checkpoints = open(&training.model, folder, content)?;
        let before = training.bits()?;
        let loaded = checkpoints.load_latest(&mut training.model, &mut training.optimizer);
        let told = loaded.err().map(|error| error.to_string());
        assert!(told.is_none() || training.bits()? == before);
        Ok(told)
    });
    common(told)
}

/// One bit, or two elements in each other's place, near or far.
#[test]
fn another_base_is_refused_and_nothing_changes() {
    let folder = tempfile::tempdir().expect("a folder");
    saved_after_two_steps(folder.path(), mesh(2, 2));
    let changes: [fn(&mut Vec<f32>); 4] = [
        |table| table[210] = f32::from_bits(table[210].to_bits() ^ 1),
        |table| table.swap(0, 1),
        |table| table.swap(5, 5 + 64),
        |table| table[0] = -table[0],
    ];
    for change in changes {
        let told = refused(folder.path(), Content::Trainable, |param| {
            let mut values = base(param);
            if param.name == "mixed.table" {
                let before = values.clone();
                change(&mut values);
                assert!(
                    values.iter().map(|it| it.to_bits()).ne(before.iter().map(|it| it.to_bits()))
                );
            }
            values
        });
        let told = told.expect("it is another base");
        let expected = "loading at step 2, on rank 0: the checkpoint was saved with other frozen parameters than this model has: their digest is 0x";
        assert!(told.starts_with(expected), "{told}");
    }
    assert_eq!(refused(folder.path(), Content::Trainable, base), None);
}

#[test]
fn a_program_that_wants_all_parameters_learns_which_are_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    saved_after_two_steps(folder.path(), mesh(2, 2));
    let told = refused(folder.path(), Content::All, base).expect("it has no frozen ones");
    let expected = "has the trainable parameters alone, and lacks the frozen ones: `mixed.table`, `still.weight`; give the model its frozen parameters, \
                    and open its checkpoints with Content::Trainable";
    assert!(told.ends_with(expected), "{told}");
}

/// It replaces the frozen parameters, too, so it needs no digest of them.
#[test]
fn a_checkpoint_of_all_parameters_is_loaded_as_a_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = common(on_ranks(2, |world| {
        let mut training = training(world, with(false), mesh(2, 1), springs::initial)?;
        training.train(2)?;
        training.save(&mut training.checkpoints(folder.path())?)?;
        training.model.full_parameters()
    }));
    let loaded = on_ranks(3, |world| {
        let zeros = |param: &Param| vec![0.0; param.numel()];
        let mut training = training(world, with(false), mesh(1, 3), zeros)?;
        let mut checkpoints = open(&training.model, folder.path(), Content::Trainable)?;
        checkpoints.load(&mut training.model, &mut training.optimizer, 2)?;
        // The digest of the next save is that of the frozen parameters that were loaded.
        training.train(1)?;
        let path = training.save(&mut checkpoints)?.path;
        assert_eq!(path.is_some(), training.model.rank().index() == 0);
        training.model.full_parameters()
    });
    let loaded = common(loaded);
    for name in ["mixed.table", "still.weight"] {
        assert!(loaded[name] == saved[name], "{name}");
    }
    assert_eq!(refused(folder.path(), Content::Trainable, base), None);
}

#[test]
fn other_trainable_parameters_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    saved_after_two_steps(folder.path(), mesh(2, 2));
    let changed = |unit: &Unit| {
        let mut unit = unit.clone();
        for param in &mut unit.params {
            param.role = match &*param.name {
                "mixed.table" => Role::Trainable,
                "mixed.scale" => Role::Frozen,
                _ => param.role,
            };
        }
        unit
    };
    let other = spec().units().iter().map(changed).fold(ModelSpec::new(), ModelSpec::unit);
    let told = common_error(outcomes(2, |world| {
        let options = ModelOptions::on(mesh(1, 2));
        let mut model = springs::model_of(world, &other, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        open(&model, folder.path(), Content::Trainable)?.load(&mut model, &mut adamw, 2)
    }));
    let told = told.to_string();
    for expected in [
        "is of another model: the number of updates of `mixed.table` is missing",
        "`mixed.table` is missing",
        "`optimizer:exp_avg:mixed.table` is missing",
        "`mixed.scale` is trainable there, and frozen in this model",
        "`optimizer:exp_avg:mixed.scale` is state that this model does not have",
    ] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
}

#[test]
fn ranks_whose_checkpoints_have_another_content_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = common_error(outcomes(3, |world| {
        let content = if world.rank().index() == 1 { Content::Trainable } else { Content::All };
        let training = training(world, with(false), mesh(1, 3), base)?;
        open(&training.model, folder.path(), content).map(drop)
    }));
    let expected = "opening checkpoints at step 0, on rank 1: the content of its checkpoints is another than on rank 0";
    assert_eq!(told.to_string(), expected);
}

/// A model without frozen parameters has all of its parameters in either kind.
#[test]
fn a_model_without_frozen_parameters_loads_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    on_ranks(2, |world| {
        let spec = ModelSpec::new().unit(Unit::new("u").param(Param::new("w", [5, 9])));
        let options = ModelOptions::on(mesh(1, 2));
        let mut model = springs::model_of(world, &spec, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let mut checkpoints = open(&model, folder.path(), Content::Trainable)?;
        checkpoints.save(&model, &adamw, &Value::Null)?;
        checkpoints.load(&mut model, &mut adamw, 0)?;
        drop(checkpoints);
        let mut checkpoints = open(&model, folder.path(), Content::All)?;
        checkpoints.load(&mut model, &mut adamw, 0).map(drop)
    });
}

/// Its trained parameters are those that were saved, so that no tensor is missing or left over.
#[test]
fn a_model_without_the_frozen_parameters_is_another_one() {
    let folder = tempfile::tempdir().expect("a folder");
    saved_after_two_steps(folder.path(), mesh(1, 2));
    let trained = |unit: &Unit| {
        let params = unit.params.iter().filter(|param| param.role == Role::Trainable).cloned();
        params.fold(Unit::new(&unit.name), Unit::param)
    };
    let units = || spec().units().iter().map(trained).collect::<Vec<_>>();
    let units = || units().into_iter().filter(|unit| !unit.params.is_empty());
    for content in [Content::All, Content::Trainable] {
        let told = common_error(outcomes(2, |world| {
            let spec = units().fold(ModelSpec::new(), ModelSpec::unit);
            let mut training = training(
                world,
                SpecAndPrecision { spec, precision: Precision::default() },
                mesh(2, 1),
                base,
            )?;
            let mut checkpoints = open(&training.model, folder.path(), content)?;
            let Training { model, optimizer } = &mut training;
            checkpoints.load_latest(model, optimizer).map(drop)
        }));
        let told = told.to_string();
        assert!(told.contains("was saved with other frozen parameters than this model"), "{told}");
        assert!(told.ends_with("and 0x0000000000000000 here"), "{told}");
    }
}
